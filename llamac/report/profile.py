"""The profile of a run as bars: the time of each operation, and its lower limit."""

from pathlib import Path

from llamac.base.errors import InputError
from llamac.profile import profile as profiles

_MOST_ROWS = 24


def picture(path: Path) -> tuple[dict | None, str]:
    """The page's data of a profile.json, or None and the reason for which there is none."""
    if not path.exists():
        return None, "the run had no --profile"
    try:
        profile = profiles.read(path)
    except InputError as error:
        return None, str(error)
    ms = 1e3 / profile.steps
    rows = []
    for row in sorted(profile.rows, key=lambda row: -row.seconds)[:_MOST_ROWS]:
        least = profiles.limit(profile, row)
        rows.append(
            {
                "name": f"{row.operation} ({row.variant})" if row.variant else row.operation,
                "category": profiles.category(row.operation),
                "ms": round(row.seconds * ms, 5),
                "share": round(row.seconds / profile.seconds, 5),
                "calls": round(row.calls / profile.steps, 2),
                "limit_ms": round(least[0] * ms, 5) if least else None,
                "by": least[1] if least else "",
            }
        )
    return {
        "title": profiles.headline(profile),
        "rows": rows,
        "others": max(0, len(profile.rows) - _MOST_ROWS),
        "shares": [
            [name, round(seconds * ms, 5), round(seconds / profile.seconds, 5)]
            for name, seconds in profiles.shares(profile).items()
            if seconds > 0
        ],
        "advice": profiles.advice(profile),
    }, ""
