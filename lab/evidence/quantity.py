"""A number with its unit: sums and differences of unlike things are refused."""

from __future__ import annotations

from dataclasses import dataclass


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
