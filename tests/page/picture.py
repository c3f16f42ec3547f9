"""Takes the picture of the page for README and documentation: `python -m tests.page.picture`."""

import tempfile
from pathlib import Path

from tests.cli.command import GPT, GPT_RULES, shardrules
from tests.house.source import REPOSITORY
from tests.page.browser import launched, opened

PICTURE = REPOSITORY / "docs" / "images" / "report.png"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.html")
        words = ("--rules", GPT_RULES, "--mesh", "data:4,model:2", "--optimizer", "adamw", "-o", str(file))
        assert shardrules("report", GPT, *words).returncode == 0
        for browser in launched():
            with opened(browser, file, width=1240, height=1440) as page:
                page.locator("#leaves tbody tr").nth(7).click()
                page.wait_for_timeout(300)
                page.evaluate("scrollTo(0, 0)")
                PICTURE.parent.mkdir(exist_ok=True)
                page.screenshot(path=PICTURE)
