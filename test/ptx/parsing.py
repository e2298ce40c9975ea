"""PTX text → a Kernel: its parameters, instructions and labels, each instruction decoded into a function of a warp."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ptx.decoding import decode
from ptx.values import TYPES, Form, split

_TOKEN = re.compile(r"\s*(?:(\{)|(\})|([$\w]+):(?!:)|(\.(?:reg|pragma)[^;]*);|([^;{}][^;]*);)")
_NAME = re.compile(r"(?<![\w.%$])[A-Za-z]\w*(?:\.[xyzw])?(?![\w])")


@dataclass
class Instruction:
    text: str
    guard: str | None  # "%p1" or "!%p1"
    op: str
    operands: list[str]


class Kernel:
    """The one entry of a PTX module.

    name; params: name → (offset, size), param_bytes in all; threads: of a CTA (.reqntid); instructions, with
    labels: name → index; code: the instructions as functions of a warp (see decoding.py).
    """

    def __init__(self, text: str):
        text = re.sub(r"//[^\n]*", "", text)
        entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", text, re.DOTALL)
        self.name, self.params, self.param_bytes = entry[1], {}, 0
        for align, kind, name, count in re.findall(r"\.param(?: \.align (\d+))? \.(\w+) (\w+)(?:\[(\d+)\])?", entry[2]):
            self._add_parameter(name, np.dtype(TYPES[kind]).itemsize * int(count or 1), align)
        self.threads = int(re.search(r"\.reqntid (\d+)", entry[3])[1])
        self.labels: dict[str, int] = {}
        self.instructions = _Body(text, entry.end(), self.labels).instructions
        self.code = [decode(self.form(instruction)) for instruction in self.instructions]

    def form(self, instruction: Instruction) -> Form:
        i = instruction
        return Form(i.text, i.op, i.operands, i.guard, self.params, self.threads)

    def _add_parameter(self, name: str, size: int, align: str) -> None:
        at = -(-self.param_bytes // int(align or size)) * int(align or size)
        self.params[name] = (at, size)
        self.param_bytes = at + size


class _Body:
    """Reads statements up to the entry's closing brace. Names declared in an inner { } are its own: they get a suffix
    @n, which also tells a reader of operands that they are registers."""

    def __init__(self, text: str, at: int, labels: dict[str, int]):
        self.labels, self.scopes, self.made = labels, [{}], 0
        statements: list[tuple[str, dict]] = []
        while self.scopes:
            match = _TOKEN.match(text, at)
            at = match.end()
            opened, closed, label, directive, statement = match.groups()
            if opened:
                self.made += 1
                self.scopes.append({None: self.made})
            elif closed:
                self.scopes.pop()
            elif label:
                self.labels[self._label(label)] = len(statements)
            elif directive:
                self._declare(directive)
            else:
                statements.append((statement.strip(), self.scopes[-1]))
        # only now, because labels may come after their use
        self.instructions = [_instruction(statement, scope) for statement, scope in statements]

    def _label(self, label: str) -> str:
        if len(self.scopes) == 1:
            return label
        scope = self.scopes[-1]
        scope[label] = f"{label}@{scope[None]}"
        return scope[label]

    def _declare(self, directive: str) -> None:
        if not directive.startswith(".reg") or len(self.scopes) == 1:
            return
        scope, words = self.scopes[-1], directive.split()
        wide = ".v4" in words
        for name in re.split(r"\s*,\s*", directive.split(words[2 if wide else 1])[1].strip()):
            parts = [f"{name}.{c}" for c in "xyzw"] if wide else [name]
            scope.update({part: f"{part}@{scope[None]}" for part in parts})
            if wide:
                scope[name] = "{" + ", ".join(scope[part] for part in parts) + "}"


def _instruction(statement: str, scope: dict) -> Instruction:
    guard = re.match(r"@(!?[%\w]+)\s+", statement)
    rest = statement[guard.end() :] if guard else statement
    op, operands = ([*rest.split(None, 1), ""])[:2]
    operands = _NAME.sub(lambda match: scope.get(match[0], match[0]), operands)
    guard = guard and re.sub(r"\w+$", lambda match: scope.get(match[0], match[0]), guard[1])
    return Instruction(statement, guard, op, split(operands))
