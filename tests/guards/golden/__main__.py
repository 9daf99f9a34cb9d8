from __future__ import annotations

from tests.guards.golden import record

if __name__ == "__main__":
    for part in record.PARTS:
        record.path_of(part).write_text(record.made(part), encoding="utf-8")
