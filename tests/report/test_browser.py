"""The page in a real browser: desktop and phone, light and dark, with nothing but the file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from recover.records import RunRecord, check_run
from recover.report.data import RunView
from recover.report.page import render
from tests.report.browser import CHROMIUM, DRIVER, Browser, started
from tests.report.runs import Deaths, MadeUp

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="no browser: install chromium and chromium-driver",
    ),
]
BACKGROUND = "return getComputedStyle(document.body).backgroundColor"
PHONE, DESKTOP = 390, 1280
LABELS = ("run0", "a/" + 140 * "x", "c")


@dataclass(frozen=True)
class Shown:
    """A page and the runs that it is about."""

    page: Path
    runs: tuple[RunRecord, ...]

    def failures(self) -> int:
        return sum(len(run.events) for run in self.runs)


def some_runs() -> dict[str, tuple[RunRecord, ...]]:
    few: Deaths = {3: [(1,)], 6: [(7,), (2,)], 9: [(0, 4)]}
    many: Deaths = {3 * n: [(2 * n,)] for n in range(32)}
    long: Deaths = {n: [(place,)] for place, n in enumerate((17, 18, 4000, 9999))}
    return {
        "two": (MadeUp(2, 4, {4: [(0,)]}).run(12), MadeUp(2, 4, {8: [(1,)]}).run(12)),
        "eight": (MadeUp(8, 17, few).run(14, note="long " * 30 + "x" * 300),),
        "sixty-four": (MadeUp(64, 512, many).run(150),),
        "long": (MadeUp(8, 64, long).run(10_000),),
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shown]:
    root = tmp_path_factory.mktemp("runs")
    pages = {}
    for name, runs in some_runs().items():
        views = [RunView(LABELS[n], run, tuple(check_run(run))) for n, run in enumerate(runs)]
        page = root / f"{name}.html"
        page.write_text(render(views), encoding="utf-8")
        pages[name] = Shown(page, runs)
    return pages


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(params=["two", "eight", "sixty-four", "long"])
def shown(request: pytest.FixtureRequest, pages: dict[str, Shown]) -> Shown:
    return pages[request.param]


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_page_fits_and_its_texts_do_not_overlap(
    browser: Browser, shown: Shown, width: int
) -> None:
    browser.open(shown.page, width=width)
    for folded in (True, False):
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.overlaps() == []
        if folded:
            browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    boxes = "return [...document.querySelectorAll('figure')].map(f => f.getBoundingClientRect())"
    assert all(box["right"] <= width and box["width"] > width / 2 for box in browser.run(boxes))
    assert browser.complaints() == []
    assert browser.requests() == [shown.page.as_uri()]


def test_every_mark_of_the_records_is_there(browser: Browser, shown: Shown) -> None:
    browser.open(shown.page, width=DESKTOP)
    runs, failures = shown.runs, shown.failures()
    charts = 3 * len(runs) + (2 if len(runs) > 1 else 1) + sum(bool(run.events) for run in runs)
    assert browser.count("figure") == charts
    loss = "figure:first-of-type"
    assert browser.count(f"{loss} .curve") == len(runs)
    assert browser.count(f"{loss} .failure") == failures
    assert browser.count(".bar") == failures
    assert browser.count(".lane") == sum(run.config["replicas"] for run in runs)  # type: ignore[misc]
    lost = sum(len(event.replicas) for run in runs for event in run.events)
    assert browser.count(".lane b") == lost
    promoted = sum(len(event.promoted) for run in runs for event in run.events)
    assert browser.count(".lane u") == promoted
    seen = "return [...document.querySelectorAll(arguments[0])].filter(e => {const b = e." + (
        "getBoundingClientRect(); return b.width >= 1 && b.height >= 1;}).length"
    )
    assert browser.run(seen, ".lane b") == lost
    assert browser.run(seen, ".lane u") == promoted
    assert browser.run(seen, ".lane i") == browser.count(".lane i")


def test_dark_and_light(browser: Browser, pages: dict[str, Shown]) -> None:
    shown = pages["eight"]
    browser.open(shown.page, width=DESKTOP)
    light = browser.run(BACKGROUND)
    browser.open(shown.page, width=DESKTOP, scheme="dark")
    dark = browser.run(BACKGROUND)
    assert brightness(light) > 200 > 60 > brightness(dark)
    button = browser.driver.find_element(By.ID, "theme")
    for expected in (light, dark):
        button.click()
        assert browser.run(BACKGROUND) == expected


def brightness(colour: str) -> float:
    parts = colour.removeprefix("rgb(").removesuffix(")").split(",")
    return sum(map(float, parts)) / 3


def test_pointing_at_a_step_shows_its_numbers(browser: Browser, pages: dict[str, Shown]) -> None:
    (run,) = pages["eight"].runs
    browser.open(pages["eight"].page, width=DESKTOP)
    tip = browser.driver.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    hits = browser.driver.find_elements(By.CSS_SELECTOR, "figure:first-of-type .hit")
    assert len(hits) == len(run.steps)
    ActionChains(browser.driver).move_to_element(hits[6]).perform()
    told = tip.text.splitlines()
    assert told[:2] == ["step 6", f"run0: {run.steps[6].loss:.4f}"]
    assert [line.split(",")[0] for line in told[2:]] == [
        "run0: replica 7 lost in step 6",
        "run0: replica 2 lost in step 6",
    ]
    cell = browser.driver.find_elements(By.CSS_SELECTOR, ".lane i")[0]
    ActionChains(browser.driver).move_to_element(cell).perform()
    assert tip.text == "replica 0, steps 0–5: major, contributes 3"
    ActionChains(browser.driver).move_to_element(
        browser.driver.find_element(By.ID, "theme")
    ).perform()
    assert not tip.is_displayed()


def test_charts_grow_and_shrink_with_the_page(browser: Browser, pages: dict[str, Shown]) -> None:
    widths = []
    for width in (PHONE, DESKTOP):
        browser.open(pages["eight"].page, width=width)
        plot = "return document.querySelector('.plot svg').getBoundingClientRect().width"
        widths.append(browser.run(plot))
    assert widths[0] >= 270
    assert widths[1] > 900


# --- the checks can fail ---------------------------------------------------------------------


def test_an_overlap_would_be_found(browser: Browser, pages: dict[str, Shown]) -> None:
    browser.open(pages["two"].page, width=DESKTOP)
    browser.run("document.querySelector('h1').style.marginBottom = '-22px'")
    assert any("ReCoVer run report" in pair for pair in browser.overlaps())


def test_a_request_and_a_complaint_would_be_found(
    browser: Browser, pages: dict[str, Shown], tmp_path: Path
) -> None:
    text = pages["two"].page.read_text(encoding="utf-8")
    open_to_all = tmp_path / "open.html"
    policy = "Content-Security-Policy"
    image = '<img src="neighbour.png">'
    open_to_all.write_text(text.replace(policy, "nothing").replace("<body>", f"<body>{image}"))
    browser.open(open_to_all, width=DESKTOP)
    assert (tmp_path / "neighbour.png").as_uri() in browser.requests()
    assert any("neighbour.png" in complaint for complaint in browser.complaints())


def test_the_browser_is_told_to_load_nothing(
    browser: Browser, pages: dict[str, Shown], tmp_path: Path
) -> None:
    """An element that asks for something, whoever put it there, is refused."""
    text = pages["two"].page.read_text(encoding="utf-8")
    file = tmp_path / "refused.html"
    file.write_text(text.replace("<body>", '<body><img src="neighbour.png">'))
    browser.open(file, width=DESKTOP)
    (complaint,) = browser.complaints()
    assert "neighbour.png" in complaint
    assert "Content Security Policy" in complaint
