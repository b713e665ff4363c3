"""Generated shell and file work: `words` to draw from, `files`, `text` and `steps` with the families, `taskset` on top."""

from tasks.shell.taskset import FAMILIES, ShellTasks, load

__all__ = ["FAMILIES", "ShellTasks", "load"]
