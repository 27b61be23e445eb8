"""Which rank a trace is of, as names and labels give it: `TP-3-DP-1-PP-0-EP-3`, `TP03-DP01`, `dp1_pp0_tp3`."""

from __future__ import annotations

import re

import msgspec

_RUN = re.compile(r"(?<![a-z])(?:(?:tp|dp|pp|ep|dcp)-?\d+(?:[-_]|(?![a-z\d])))+", re.IGNORECASE)
_ONE = re.compile(r"(?<![a-z])(tp|dp|pp|ep)-?(\d+)", re.IGNORECASE)
_GLOBAL = re.compile(r"rank[-_ ]?(\d+)", re.IGNORECASE)


class Coordinates(msgspec.Struct, frozen=True):
    """A rank by the kinds of parallelism; None where the name leaves one out, as it does where there is only one rank.

    Attributes:
        tp: In tensor parallelism. With data-parallel attention it goes through all of them: TP 0 and 1 are DP 0, TP 2
            and 3 are DP 1; of replicas each has its own TP 0.
        dp: In data parallelism.
        pp: In pipeline parallelism.
        ep: In expert parallelism, which follows from `tp`.
    """

    tp: int | None = None
    dp: int | None = None
    pp: int | None = None
    ep: int | None = None

    def __str__(self) -> str:
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return " ".join(f"{name.upper()}-{number}" for name, number in given.items() if number is not None)

    @property
    def place(self) -> tuple[int, int, int]:
        """Which process it is: TP, DP and PP, counted from 0 where one is left out."""
        return self.tp or 0, self.dp or 0, self.pp or 0

    def within(self, other: Coordinates) -> bool:
        """Whether it is one of the ranks that `other` stands for by giving some of the coordinates."""
        fields = self.__struct_fields__
        return all(getattr(other, name) in (None, getattr(self, name) or 0) for name in fields)


def coordinates_in(text: str) -> Coordinates | None:
    """The coordinates that a file's name or a merged trace's label gives; the last of several, as a prefix is first."""
    runs = _RUN.findall(text)
    return _coordinates(runs[-1]) if runs else None


def global_rank_in(text: str) -> int | None:
    """The rank that a name gives as `rank-3` or `rank_3`."""
    found = _GLOBAL.search(text)
    return int(found[1]) if found else None


def parse_rank(text: str) -> int | Coordinates | None:
    """What somebody asks for: `3`, `TP1-DP0`, `DP-1`, or as reports write it, `TP-1 DP-0`; None if it is no rank."""
    if text.isdecimal():
        return int(text)
    run = "-".join(text.split())
    return _coordinates(run) if _RUN.fullmatch(run) else None


def _coordinates(run: str) -> Coordinates:
    return Coordinates(**{name.lower(): int(number) for name, number in _ONE.findall(run)})
