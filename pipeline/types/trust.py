"""How long something that failed is left alone."""

from __future__ import annotations

from dataclasses import dataclass

FORGIVEN = 16  # rounds without a fault after which earlier ones no longer count


@dataclass
class Trust:
    """Each fault doubles the rounds to sit out; enough healthy rounds wipe the slate clean. So a
    chance fault costs two rounds, and what fails for ever is tried less and less often."""

    strikes: int = 0
    barred: int = 0  # rounds still to sit out
    healthy: int = 0

    def suspect(self) -> None:
        """It may have been the cause."""
        self.strikes, self.healthy = self.strikes + 1, 0

    def strike(self) -> None:
        """It was the cause."""
        self.suspect()
        self.barred = 2**self.strikes

    def round(self) -> None:
        """A round has passed without another fault."""
        if self.barred:
            self.barred -= 1
        elif self.strikes:
            self.healthy += 1
            if self.healthy == FORGIVEN:
                self.strikes = self.healthy = 0
