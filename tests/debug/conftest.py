from __future__ import annotations

from tests.browser import open_page

__all__ = ["open_page"]
