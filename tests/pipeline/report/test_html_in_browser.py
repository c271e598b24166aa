"""report.html in a real browser, opened from disk: what is drawn, said, reached and asked for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from kvlab.output import format as fmt
from kvlab_pipeline.report import figures
from kvlab_pipeline.report import page as html_page
from pipeline.report.example_metrics import build

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PHONE, DESK = {"width": 360, "height": 800}, {"width": 1280, "height": 900}
METRICS = build(unresolved=("protocol",))
# What may reach beyond its page: the content of a region that scrolls, a closed fold, the link that waits above.
TOO_WIDE = """() => [...document.querySelectorAll('body *')]
  .filter((one) => !one.closest('.scroll') || one.matches('.scroll'))
  .filter((one) => !one.closest('svg') || one.matches('svg'))
  .filter((one) => one.getClientRects().length && getComputedStyle(one).visibility !== 'hidden')
  .filter((one) => one.closest('pre') === null || one.matches('pre'))
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 || one.getBoundingClientRect().left < -1)
  .map((one) => one.outerHTML.slice(0, 120))"""
# Row and box of every mark of the drawing that is seen.
BOXES = """(plot) => [...plot.querySelectorAll('[data-row]')].filter((one) => one.getClientRects().length)
  .map((one) => ({ row: Number(one.dataset.row), ...one.getBoundingClientRect().toJSON() }))"""
WIDE_TABLE = "| " + " | ".join(f"column {n} of many" for n in range(12)) + " |"
TABLE = "\n".join([WIDE_TABLE, "|" + "---|" * 12, WIDE_TABLE])
TEXT = "\n\n".join(
    [
        "# What it costs",
        "## The answer",
        "All of it.",
        *(
            f"## About {name}\n\n<details><summary>What <code>{name}</code> shows</summary>\n\n### Part\n\n"
            f"![Numbers of {name}](figures/{name}.svg)\n\n{TABLE}\n\n</details>"
            for name in figures.FIGURES
        ),
    ]
)
CONTRAST = """(one) => {
  const channels = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  const light = (colour) => channels(colour).reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = getComputedStyle(document.body).backgroundColor;
  const [dark, bright] = [light(getComputedStyle(one).color), light(ground)].sort((a, b) => a - b);
  return (bright + 0.05) / (dark + 0.05);
}"""


def executable() -> str:
    """The browser; without one the tests are skipped, or fail where KVLAB_REQUIRE_BROWSER=1 asks for it."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found:
        return found
    reason = f"no browser: none of {', '.join(NAMES)} is on the PATH"
    if os.environ.get("KVLAB_REQUIRE_BROWSER") == "1":
        pytest.fail(f"{reason}, and KVLAB_REQUIRE_BROWSER=1 requires one")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser():
    """The one headless Chromium of these tests, with an empty profile of its own.

    It ends with this module: while it runs, this thread has an event loop, and tests after it may need their own.
    """
    path = executable()
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, headless=True, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """The page of made-up metrics."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    html_page.write(out, TEXT, METRICS)
    return out


class Window:
    """The page in a context of its own, with all that it asked for and complained of."""

    def __init__(self, browser, report: Path, size: dict = DESK, init: str | None = None, **options):
        self.address, self.asked, self.complaints = report.as_uri(), [], []
        self.context = browser.new_context(viewport=size, reduced_motion="reduce", **options)
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        if init:
            self.page.add_init_script(init)
        self.page.goto(self.address)

    def close(self):
        """Nothing but the file itself was asked for, and nothing went wrong, whatever the test did."""
        self.context.close()
        assert self.complaints == []
        assert set(self.asked) == {self.address}


@pytest.fixture
def opened(browser, report):
    """A function that opens the page in a window of the test's own."""
    windows = []

    def start(*size, **options):
        windows.append(Window(browser, report, *size, **options))
        return windows[-1].page

    yield start
    for window in windows:
        window.close()


def unfold(page):
    """The page with everything open."""
    page.evaluate("document.querySelectorAll('main details').forEach((one) => (one.open = true))")
    return page


@pytest.fixture(scope="module", params=[DESK, PHONE], ids=["desk", "phone"])
def seen(request, browser, report):
    """The page, unfolded, on a desk and on a phone, for tests that leave it as it is."""
    window = Window(browser, report, request.param)
    yield unfold(window.page)
    window.close()


def lines_of(name: str) -> list[dict]:
    return list(figures.FIGURES[name].table(METRICS).iter_rows(named=True))


def until(page, holds, tries: int = 200) -> None:
    """Wait until something holds; the page answers a moment later."""
    while not holds():
        tries -= 1
        assert tries, "it never came to hold"
        page.wait_for_timeout(25)


def said(page, name: str) -> str:
    """What a figure says of the mark that is pointed at."""
    return "; ".join(page.locator(f"#figure-{name}-said span").all_text_contents())


# ---------------------------------------------------------------------------------------------- folds


@pytest.mark.full
def test_the_page_opens_with_its_answer_and_everything_else_folded(opened):
    page = opened()
    assert page.get_by_text("All of it.").is_visible()
    assert page.locator("main h2").last.is_visible() and not page.locator(".plot").first.is_visible()
    assert page.evaluate("document.documentElement.scrollHeight / innerHeight") < 2


@pytest.mark.nightly
def test_a_link_opens_the_section_that_it_leads_to(opened):
    page = opened()
    page.get_by_role("navigation").get_by_role("link", name="About noise").click()
    plot = page.locator("#figure-noise-plot")
    until(page, plot.is_visible)
    assert page.locator("details[open] .plot").count() == 1
    heading = page.get_by_role("heading", name="About noise")
    until(page, lambda: 0 <= heading.bounding_box()["y"] < DESK["height"] / 2)


@pytest.mark.nightly
def test_one_button_opens_and_closes_all_sections(opened):
    page = opened()
    page.get_by_role("button", name="Open all").click()
    assert page.locator("main details.section[open]").count() == len(figures.FIGURES)
    page.get_by_role("button", name="Close all").click()
    assert page.locator("main details[open]").count() == 0


# -------------------------------------------------------------------------------------------- figures


@pytest.mark.nightly
@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_number_of_every_figure_is_drawn(seen, name):
    plot = seen.locator(f"#figure-{name}-plot")
    boxes = plot.evaluate(BOXES)
    assert {box["row"] for box in boxes} == set(range(len(lines_of(name))))
    assert all(box["width"] > 0 or box["height"] > 0 for box in boxes)
    room = plot.evaluate("(one) => one.getBoundingClientRect().toJSON()")
    assert all(room["top"] < box["top"] and box["bottom"] < room["bottom"] for box in boxes)
    assert all(room["left"] <= box["left"] and box["right"] <= room["right"] + 1 for box in boxes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", figures.FIGURES)
def test_arrow_keys_step_through_the_values_of_the_metrics(seen, name):
    page = seen
    page.locator(f"#figure-{name}-plot").focus()
    for line in lines_of(name):
        page.keyboard.press("ArrowRight")
        assert fmt.estimate(line) in said(page, name)
        assert f"{line['n_windows']} windows" in said(page, name)
    page.keyboard.press("ArrowRight")  # round to the first
    assert fmt.estimate(lines_of(name)[0]) in said(page, name)
    page.keyboard.press("ArrowLeft")
    assert fmt.estimate(lines_of(name)[-1]) in said(page, name)
    page.keyboard.press("Home")
    assert fmt.estimate(lines_of(name)[0]) in said(page, name)
    page.keyboard.press("Escape")
    assert said(page, name) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["layers", "cells", "gap_shapley"])
def test_the_pointer_shows_the_value_under_it(seen, name):
    page = seen
    plot = page.locator(f"#figure-{name}-plot")
    plot.scroll_into_view_if_needed()
    box = plot.evaluate(BOXES)[-1]
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    if not 0 < y < seen.viewport_size["height"]:
        page.mouse.wheel(0, y - 200)
        until(page, lambda: 0 < plot.evaluate(BOXES)[-1]["y"] < seen.viewport_size["height"])
        box = plot.evaluate(BOXES)[-1]
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    assert fmt.estimate(lines_of(name)[box["row"]]) in said(page, name)
    assert plot.locator(".on").count() >= 1
    page.mouse.move(0, 0)
    assert said(page, name) == ""


@pytest.mark.nightly
def test_a_finger_shows_the_value_under_it(opened):
    page = unfold(opened(PHONE, has_touch=True, is_mobile=True))
    plot = page.locator("#figure-layers-plot")
    plot.locator(".narrow [data-row]").first.scroll_into_view_if_needed()
    box = plot.evaluate(BOXES)[0]
    page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    until(page, lambda: said(page, "layers"))
    assert fmt.estimate(lines_of("layers")[box["row"]]) in said(page, "layers")


@pytest.mark.nightly
def test_on_a_phone_what_a_point_says_is_in_sight_even_of_a_tall_figure(opened):
    page = unfold(opened({"width": 360, "height": 400}))
    page.locator("#figure-cells-plot").focus()
    for key in ("ArrowRight", "End"):
        page.keyboard.press(key)
        tip = page.locator("#figure-cells-said").bounding_box()
        assert tip["y"] >= -1 and tip["y"] + tip["height"] <= 401
        assert tip["x"] >= 0 and tip["x"] + tip["width"] <= 361


@pytest.mark.nightly
def test_letters_of_a_drawing_are_large_enough_to_read(seen):
    heights = seen.evaluate(
        """() => [...document.querySelectorAll('.plot svg text')].filter((one) => one.getClientRects().length)
          .map((one) => [parseFloat(getComputedStyle(one).fontSize), one.getScreenCTM()])
          .map(([size, to]) => size * Math.hypot(to.b, to.d))"""
    )
    assert heights and min(heights) >= 9.5  # pixels


# ------------------------------------------------------------------------------------------- themes


def colours(page) -> dict[str, str]:
    return page.evaluate(
        """() => ({
          paper: getComputedStyle(document.body).backgroundColor,
          ink: getComputedStyle(document.body).color,
          mark: getComputedStyle(document.querySelector('#figure-cells-plot [data-row] use')).fill,
          words: getComputedStyle(document.querySelector('#figure-cells-plot svg text')).fill,
        })"""
    )


@pytest.mark.nightly
def test_the_button_changes_every_colour_and_is_remembered(opened):
    page = opened(color_scheme="light")
    light = colours(page)
    button = page.get_by_role("button", name="Dark theme")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    dark = colours(page)
    assert button.get_attribute("aria-pressed") == "true"
    assert all(light[name] != dark[name] for name in light)
    assert page.locator("h2").first.evaluate(CONTRAST) > 7
    page.reload()
    assert colours(page) == dark
    page.get_by_role("button", name="Dark theme").click()
    assert colours(page) == light


@pytest.mark.nightly
def test_the_system_s_theme_holds_until_somebody_chooses(opened):
    page = opened(color_scheme="dark")
    dark = colours(page)
    page.emulate_media(color_scheme="light")
    until(page, lambda: colours(page)["paper"] != dark["paper"])
    assert all(colours(page)[name] != dark[name] for name in dark)


@pytest.mark.nightly
def test_a_browser_that_remembers_nothing_still_changes_its_theme(opened):
    refuse = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('refused'); }});"
    page = opened(init=refuse, color_scheme="light")
    before = colours(page)
    page.get_by_role("button", name="Dark theme").press("Enter")
    assert colours(page)["paper"] != before["paper"]


# --------------------------------------------------------------------------------- room and keyboard


@pytest.mark.nightly
def test_nothing_is_wider_than_the_window_even_when_it_is_turned(opened):
    page = unfold(opened(PHONE))
    for size in (PHONE, {"width": 800, "height": 360}, DESK, PHONE):
        page.set_viewport_size(size)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert page.evaluate(TOO_WIDE) == []


@pytest.mark.nightly
def test_panels_stand_side_by_side_or_below_each_other(seen):
    """Of K and V of the same layer, the second mark is to the right of the first, or below it."""
    rows = {
        (line["kind"], line["stream"], line["layer"], line["engine"]): row
        for row, line in enumerate(lines_of("layers"))
    }
    boxes = {box["row"]: box for box in seen.locator("#figure-layers-plot").evaluate(BOXES)}
    (kind, _, layer, engine), stacked = next(iter(rows)), seen.viewport_size == PHONE
    left, right = (boxes[rows[kind, stream, layer, engine]] for stream in "kv")
    assert (right["x"] > left["x"] + 50) != stacked
    assert (abs(right["x"] - left["x"]) < 1) == stacked


@pytest.mark.nightly
def test_wide_tables_scroll_in_a_named_region_of_their_own(opened):
    page = unfold(opened(PHONE))
    page.evaluate("document.querySelectorAll('.numbers').forEach((one) => (one.open = false))")
    names = page.evaluate("[...document.querySelectorAll('.scroll')].map((one) => one.getAttribute('aria-label'))")
    assert all(names) and len(names) == len(set(names))
    wide = page.locator("div[id] > .scroll[tabindex='0']")
    assert wide.count() > 3
    region = wide.first
    region.focus()
    assert region.evaluate("(one) => one === document.activeElement")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    until(page, lambda: region.evaluate("(one) => one.scrollLeft") > 0)


@pytest.mark.nightly
def test_the_tab_key_reaches_link_button_sections_and_figures_in_order(opened):
    page = unfold(opened())
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                """() => {
                  const one = document.activeElement;
                  const style = getComputedStyle(one);
                  return {
                    what: one.className || one.id || one.tagName,
                    nav: one.closest('nav') !== null,
                    seen: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
                  };
                }"""
            )
        )
        if "plot" in reached[-1]["what"].split():
            break
    whats = [one["what"] for one in reached]
    assert whats[:3] == ["skip", "unfold", "theme"]
    assert sum(one["nav"] for one in reached) == 1 + page.locator("nav a").count()
    assert "plot" in whats[-1].split()
    assert all(one["seen"] for one in reached)


@pytest.mark.nightly
def test_the_first_link_skips_to_the_findings(opened):
    page = opened()
    page.keyboard.press("Tab")
    box = page.locator(".skip").bounding_box()
    assert box["y"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "findings"


@pytest.mark.nightly
def test_what_a_reader_of_roles_finds(seen):
    page = seen
    page.locator("#contents").evaluate("(one) => { one.open = true; }")
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.get_by_role("navigation", name="Sections").get_by_role("link").count() > 5
    assert page.get_by_role("figure").count() == len(figures.FIGURES)
    for name in figures.FIGURES:
        plot = page.locator(f"#figure-{name}-plot")
        assert plot.get_attribute("role") == "application" and plot.get_attribute("tabindex") == "0"
        assert str(len(lines_of(name))) in plot.get_attribute("aria-label")
        assert page.locator(f"#{plot.get_attribute('aria-describedby')}").get_attribute("role") == "status"


# ---------------------------------------------------------------------- without scripts, on paper, alone


@pytest.mark.nightly
def test_without_scripts_the_words_tables_and_drawings_are_there(opened):
    page = opened(PHONE, java_script_enabled=False)
    fold = page.locator("main details.section").nth(list(figures.FIGURES).index("cells"))
    assert not fold.locator("svg").first.is_visible()
    fold.locator("summary").first.click()
    assert fold.locator(".narrow svg").is_visible() and not page.locator("#theme").is_visible()
    fold.locator(".numbers summary").click()
    assert page.locator("#figure-cells table").is_visible()


@pytest.mark.nightly
def test_on_paper_there_is_no_furniture(opened):
    page = opened(color_scheme="dark")
    page.emulate_media(media="print")
    unfold(page)
    for furniture in ("nav", "#theme", ".numbers"):
        assert not page.locator(furniture).first.is_visible()
    assert colours(page)["paper"] == "rgb(255, 255, 255)"
    page.emulate_media(media="screen")
    assert colours(page)["paper"] != "rgb(255, 255, 255)"


@pytest.mark.full
def test_the_page_cannot_speak_to_a_network(browser, report):
    """Even a script of the page's own is refused: the policy, not good manners, keeps it quiet."""
    context = browser.new_context()
    page, asked = context.new_page(), []
    page.goto(report.as_uri())
    page.on("request", lambda request: asked.append(request.url))
    answer = page.evaluate(
        """() => new Promise((answer) => {
          addEventListener('securitypolicyviolation', (event) => answer(event.effectiveDirective));
          fetch('http://127.0.0.1:9/').catch(() => {});
        })"""
    )
    context.close()
    assert answer == "connect-src" and asked == []
