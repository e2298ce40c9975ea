"""python test/ptx COMMAND: what the tests of `make test` do not do. See README.md."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that this package is `ptx`

from ptx.launches import prepare  # noqa: E402

SYNC_CASES = ["exp three tiles a cluster", "exp all", "backward all", "forward ragged"]
VALUE_CASES = ["exp rows ragged", "forward ragged", "backward rows ragged"]


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(prog="python test/ptx", description=__doc__)
    commands = main.add_subparsers(dest="command", required=True)
    mutate = commands.add_parser("mutate", help="take out instructions, shift constants: do the cases notice?")
    mutate.add_argument("which", choices=("sync", "values"))
    mutate.add_argument("--case", action="append", help="of cases.py; repeatable")
    mutate.add_argument("--seeds", type=int, default=12)
    mutate.add_argument("--count", type=int, help="a sample of so many mutants a case")
    mutate.add_argument("--arch", default="sm_100a")
    record = commands.add_parser("record", help="on a Hopper GPU: run the cases there and write what they give")
    record.add_argument("file", type=Path)
    commands.add_parser("count", help="count what each warp does a tile against the time of the MMAs")
    commands.add_parser("host", help="processor time of warm calls, launches left out")
    return main


def main() -> None:
    arguments = parser().parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.command == "record":
        from ptx import recording

        recording.record(arguments.file)
    elif arguments.command == "count":
        prepare("sm_100a", keep="ptx,cubin")
        from ptx import counting

        counting.report()
    elif arguments.command == "host":
        prepare("sm_90a")
        from ptx import host_time

        host_time.report()
    elif arguments.command == "mutate":
        prepare(arguments.arch)
        from ptx import mutants

        sync = arguments.which == "sync"
        cases = arguments.case or (SYNC_CASES if sync else VALUE_CASES)
        seeds = list(range(arguments.seeds)) if sync else [None]
        mutants.report(arguments.arch, cases, seeds, arguments.which, arguments.count)


if __name__ == "__main__":
    main()
