"""Dates and times of JSON Schema's `format` as regular expressions: those of RFC 3339 that every reader takes.

Days that no calendar has, the year 0, leap seconds (a reader may know none) and small letters are left out.
"""

from __future__ import annotations

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LONG = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAY = f"(?:{_LONG}|{_SHORT}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # of years or centuries, but for the one that ends with 00
_DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"

_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:[.][0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"

MOMENTS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Format -> expression in the words of the compiler of grammars."""
