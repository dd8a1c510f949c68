"""What must happen before any test module is imported, and fixtures that several files share."""

from __future__ import annotations

from stages.device import Device

Device().open()  # the fast BLAS has to be there before any test imports mlx
