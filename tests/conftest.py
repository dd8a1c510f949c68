"""What must happen before any test file is imported, and fixtures that several of them share."""

from __future__ import annotations

from stages.device import Device

# Before a test imports mlx: on a Linux CPU its products would be ten times slower ever after.
Device().open()
