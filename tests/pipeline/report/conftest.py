"""What the tests of reports share."""

from __future__ import annotations

import pytest

from kvlab_pipeline.rendering import svg

PICTURE = '<svg viewBox="0 0 20 20"></svg>'
DRAWN = ("test_figures.py", "test_html_in_browser.py")  # these look at what is drawn


@pytest.fixture(autouse=True)
def no_drawing(request):
    """Drawing is what takes time; it is left out but where a test looks at it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in DRAWN:
            patch.setattr(svg, "write", lambda _figure, path: path.write_text(PICTURE))
            patch.setattr(svg, "sentence", lambda text, path: path.write_text(text))
            patch.setattr(svg, "inline", lambda _figure, _name, _width: PICTURE)
        yield
