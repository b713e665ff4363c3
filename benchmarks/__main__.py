"""`python -m benchmarks [NAME ...]`: run the benchmarks, one process each, and renew the table in README.md.

A benchmark is a module `bench_NAME.py` here whose `main()` calls `write_results(NAME, rows)`. The table is made from
`results/*.json` alone, so that a figure in it always has a command, a date and a machine.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.results import render_table

HERE = Path(__file__).parent


def main() -> int:
    names = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks and renew the table.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which; all of {', '.join(names)} by default")
    parser.add_argument("--table", action="store_true", help="only renew the table")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    failed = []
    if not arguments.table:
        for name in arguments.names or names:
            print(f"== {name}", flush=True)
            if subprocess.run([sys.executable, "-m", f"benchmarks.bench_{name}"], cwd=HERE.parent, check=False).returncode:
                failed.append(name)
    readme = HERE / "README.md"
    head = readme.read_text().split("<!-- results -->")[0]
    readme.write_text(f"{head}<!-- results -->\n\n{render_table()}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
