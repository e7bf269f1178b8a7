"""Look at each page of the built docs in Chromium at the widths of a desktop and of a phone, and report what is broken.

    pip install PyQt6-WebEngine
    python .ci/pages.py docs/_build/html runs/pages

Errors: a page that scrolls sideways, an element past the edge that no box around it scrolls, a picture that is missing,
an error of a script, a page without a heading, a search without results, and Python that scrolls on a desktop. It saves
a picture of each page.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")

from PyQt6.QtCore import QEventLoop, QTimer, QUrl
from PyQt6.QtGui import QImage, QPainter
from PyQt6.QtWebEngineCore import QWebEnginePage
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

WIDTHS = {"desktop": 1280, "phone": 390}  # pixels
PART = 1500  # pixels of the height that are painted at once: Chromium leaves the rest of a tall window blank
PAUSE = 300  # milliseconds for a page to settle
FAULTS = """(() => {
  const width = document.documentElement.clientWidth, faults = [];
  const boxes = [document.documentElement, ...document.querySelectorAll(".content")];  // which the theme scrolls
  const more = Math.max(...boxes.map(box => box.scrollWidth - box.clientWidth));
  if (more > 0) faults.push(`the page is ${more} pixels too wide`);
  const scrolls = element => {  // in a box of the article: beyond it the theme scrolls or hides whatever is too wide
    for (; element.tagName != "ARTICLE"; element = element.parentElement)
      if (getComputedStyle(element).overflowX != "visible") return true;
    return false;
  };
  for (const element of document.querySelectorAll("article *"))
    if (element.getBoundingClientRect().right > width + 1 && !scrolls(element))
      faults.push(`past the edge: ${element.tagName} ${element.textContent.trim().slice(0, 60)}`);
  if (width > 1000) for (const code of document.querySelectorAll(".highlight-python pre"))
    if (code.scrollWidth > code.clientWidth) faults.push(`code that scrolls: ${code.textContent.trim().slice(0, 60)}`);
  for (const image of document.images) if (!image.naturalWidth) faults.push(`no picture: ${image.src}`);
  const isSearch = location.pathname.endsWith("/search.html");
  if (!isSearch && !document.querySelector("h1")) faults.push("no heading");
  if (isSearch && !document.querySelector("#search-results li")) faults.push("a search finds nothing");
  return JSON.stringify([faults, document.documentElement.scrollHeight]);
})()"""


class Page(QWebEnginePage):
    """A page that keeps the errors of its scripts."""

    def __init__(self, parent: QWebEngineView) -> None:
        super().__init__(parent)
        self.errors: list[str] = []

    def javaScriptConsoleMessage(self, level: Any, message: str | None, line: int, source: str | None) -> None:
        if level == QWebEnginePage.JavaScriptConsoleMessageLevel.ErrorMessageLevel:
            self.errors.append(f"script: {message}")


def wait(milliseconds: int) -> None:
    loop = QEventLoop()
    QTimer.singleShot(milliseconds, loop.quit)
    loop.exec()


def load(view: QWebEngineView, url: QUrl) -> None:
    loop = QEventLoop()
    view.loadFinished.connect(loop.quit)
    view.load(url)
    loop.exec()
    view.loadFinished.disconnect(loop.quit)
    wait(PAUSE)


def look(page: Page) -> tuple[list[str], int]:
    """The faults of the page that is loaded, and its height."""
    loop, found = QEventLoop(), []

    def take(result: str) -> None:
        found.append(result)
        loop.quit()

    page.runJavaScript(FAULTS, take)
    if not found:
        loop.exec()
    faults, height = json.loads(found[0])
    return faults + page.errors, height


def picture(view: QWebEngineView, page: Page, height: int) -> QImage:
    """The whole page, painted part by part; what stays in its place while one scrolls is in each part."""
    part = min(height, PART)
    view.resize(view.width(), part)
    whole = QImage(view.width(), height, QImage.Format.Format_RGB32)
    painter = QPainter(whole)
    for top in [*range(0, height - part, part), height - part]:
        page.runJavaScript(f"window.scrollTo({{top: {top}, behavior: 'instant'}})")
        wait(PAUSE)
        painter.drawPixmap(0, top, view.grab())
    painter.end()
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("html", type=Path, help="folder of the built pages")
    parser.add_argument("pictures", type=Path, help="folder to save pictures in")
    options = parser.parse_args()
    pages = [each for each in sorted(options.html.rglob("*.html")) if "_modules" not in each.parts]
    if not pages:
        parser.error(f"Expected 'html' to have pages (got none in {options.html}). Run sphinx-build first.")
    app = QApplication(sys.argv[:1])
    view, bad = QWebEngineView(), 0
    page = Page(view)
    view.setPage(page)
    view.show()
    for name, width in WIDTHS.items():
        folder = options.pictures / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in pages:
            title = "-".join(file.relative_to(options.html).with_suffix("").parts)
            url = QUrl.fromLocalFile(str(file.resolve()))
            if file.name == "search.html":
                url.setQuery("q=sparsifier")
            view.resize(width, 900)
            page.errors = []
            load(view, url)
            faults, height = look(page)
            picture(view, page, height).save(str(folder / f"{title}.png"))
            for fault in faults:
                print(f"{title}, {name}: {fault}")
            bad += bool(faults)
    print(f"{len(pages)} pages at {len(WIDTHS)} widths: {bad} with faults. Pictures: {options.pictures}")
    app.quit()
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
