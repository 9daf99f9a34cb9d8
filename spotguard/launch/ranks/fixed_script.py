"""Runs a script of the run's copy as if it were the file in the user's folder.

    python fixed_script.py COPY SCRIPT ARGUMENT...

By `python SCRIPT` the file would be read that is there now, before any code of ours could ask for
another. This module becomes the script: nothing of it is left in `__main__`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType


def _run() -> None:
    import linecache
    import os
    import sys

    copy, script = sys.argv[1:3]
    with open(copy, "rb") as file:  # noqa: PTH123 - pathlib takes longer
        source = file.read()
    sys.argv[:] = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.realpath(script))  # noqa: PTH120
    lines = source.decode("utf-8", "replace").splitlines(keepends=True)
    linecache.cache[script] = (len(source), None, lines, script)
    show, run = sys.excepthook, exec

    def shown(kind: type[BaseException], problem: BaseException, trace: TracebackType) -> None:
        """Leave out the frames of this file."""
        ours = trace.tb_next.tb_next if trace and trace.tb_next else trace
        show(kind, problem.with_traceback(ours), ours)

    sys.excepthook = shown  # type: ignore[assignment]
    names = sys.modules["__main__"].__dict__
    code = compile(source, script, "exec", dont_inherit=True)
    loader = names["__loader__"]
    names.clear()
    names.update(__name__="__main__", __file__=script, __doc__=None, __package__=None)
    names.update(__spec__=None, __cached__=None, __loader__=loader)
    run(code, names)


if __name__ == "__main__":
    _run()
