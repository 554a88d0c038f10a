"""A number with its unit: sums and differences of unlike things are refused."""

from __future__ import annotations

from dataclasses import dataclass

# What a figure on a page may be in: each with its base unit and the factor to it.
MEASURES: dict[str, tuple[str, float]] = {
    "%": ("%", 1),
    "ns": ("s", 1e-9),
    "us": ("s", 1e-6),
    "ms": ("s", 1e-3),
    "s": ("s", 1),
    "min": ("s", 60),
    "h": ("s", 3600),
    "days": ("s", 86_400),
    "weeks": ("s", 604_800),
    "KiB": ("bytes", 2**10),
    "MiB": ("bytes", 2**20),
    "GiB": ("bytes", 2**30),
    "TiB": ("bytes", 2**40),
    "kB": ("bytes", 1e3),
    "MB": ("bytes", 1e6),
    "GB": ("bytes", 1e9),
    "TB": ("bytes", 1e12),
    "Mbit": ("bits", 1e6),
    "Gbit": ("bits", 1e9),
    "Gbit/s": ("bits/s", 1e9),
    "MB/s": ("bytes/s", 1e6),
    "GB/s": ("bytes/s", 1e9),
    "TB/s": ("bytes/s", 1e12),
    "req/s": ("req/s", 1),
    "tokens": ("tokens", 1),
    "tokens/s": ("tokens/s", 1),
    "tokens/s/GPU": ("tokens/s/GPU", 1),
    "×": ("×", 1),
}


class MixedUnits(ValueError):
    """A sum or a difference of two units."""


@dataclass(frozen=True)
class Quantity:
    """``value`` in ``unit``; a multiple keeps the unit."""

    value: float
    unit: str

    def _like(self, other: Quantity) -> float:
        if self.unit != other.unit:
            raise MixedUnits(f"mixes {self.unit} and {other.unit}")
        return other.value

    def __add__(self, other: Quantity) -> Quantity:
        return Quantity(self.value + self._like(other), self.unit)

    def __sub__(self, other: Quantity) -> Quantity:
        return Quantity(self.value - self._like(other), self.unit)

    def __rmul__(self, times: float) -> Quantity:
        return Quantity(times * self.value, self.unit)

    def over(self, other: Quantity) -> Quantity:
        """Their ratio: how many times the other one."""
        return Quantity(self.value / self._like(other), "×")

    def share(self, whole: Quantity) -> Quantity:
        """Which part of another one it is, in percent."""
        return Quantity(self.value / self._like(whole) * 100, "%")

    def named(self, unit: str) -> Quantity:
        """The same number in a unit of its own: where a factor has changed what it counts."""
        return Quantity(self.value, unit)

    def above(self, other: Quantity) -> Quantity:
        """By how many percent it is more than the other one."""
        return Quantity((self.value / self._like(other) - 1) * 100, "%")
