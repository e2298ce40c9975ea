"""Liger-Kernel: registration with its dispatchers, the switch, and the operators that take the place of its own."""
