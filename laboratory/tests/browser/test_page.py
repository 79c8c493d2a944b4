"""The page in a real browser, at desktop and phone width: `make test-browser`; skipped where there is none."""

import json
import math
import shutil
from itertools import combinations
from pathlib import Path

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install '.[browser]'")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

import decomposable as dn  # noqa: E402
from decomposable_lab.comparison.explorer import explored  # noqa: E402
from decomposable_lab.report.finding import Found, find  # noqa: E402
from decomposable_lab.report.page import page  # noqa: E402

BROWSER, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(None in (BROWSER, DRIVER), reason="no browser: Debian's chromium and chromium-driver"),
]
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
SHOTS = Path("browser-out")
RECORDS = Path(__file__).resolve().parents[3] / "results"
APART = 30  # of two colours, in steps of red, green and blue


def exhibit(name: str, kind: str, explorer=None) -> dict:
    sizes = [1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1]
    series = [
        {"name": f"method {i} with a rather long name", "x": sizes, "y": [90 - i - 5 / size**0.5 for size in sizes],
         "low": [], "high": [], "method": method, "is_dashed": bool(i % 2)}
        for i, method in enumerate(["elastic", "decomposable", "us-net", "slimmable", "plain", "width"])
    ]  # fmt: skip
    figure = {
        "title": "Accuracy over size",
        "x": {"label": "MACs, as a fraction of the original network's", "is_log": True},
        "y": {"label": "test accuracy (%)"},
        "series": series,
        "kind": "lines",
    }
    if kind == "bars":
        names = [f"layer{i}.conv" for i in range(8)]
        bars = [{"name": f"way {i}", "x": list(range(8)), "y": [0.1 * (i + 1)] * 8} for i in range(3)]
        figure |= {"kind": "bars", "categories": names, "series": bars, "x": {"label": "layer"}, "y": {"label": "part"}}
    if kind == "dots":
        here = {"name": "here", "x": [90.0, 89.0], "y": [0, 1], "low": [89.5, 88.0], "high": [90.5, 89.5]}
        paper = {"name": "the paper's", "x": [76.0], "y": [1], "is_points": True, "is_hollow": True}
        rows = ["Decomposable-Net", "a narrower network, trained alone for eight epochs"]
        axes = {"x": {"label": "test accuracy (%)"}, "y": {"label": ""}}
        figure |= {"kind": "dots", "categories": rows, "series": [here, paper], **axes}
    return {
        "exhibit": name, "title": f"Exhibit {name}", "where": "figure 2", "scale": "laptop", "figures": [figure],
        "tables": [{"title": "A table", "columns": ["method", "accuracy (%)"], "rows": [["elastic", "90.1"]]}],
        "claims": [
            {"text": "A claim of the paper.", "verdict": "holds", "seen": "+1.0 at 0.25×"},
            {"text": "Another one, which does not.", "verdict": "fails", "seen": "-1.0 at 0.25×", "on": "a network"},
        ],
        "remarks": ["One seed has no range."],
        "explorer": explorer, "command": "decomposable-lab compare --exhibit all --scale laptop", "commit": "abc",
    }  # fmt: skip


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    import torch

    model = dn.models.small_cnn()
    net = dn.decompose(model, torch.zeros(1, 1, 8, 8))
    measured = [{"macs_fraction": size, "accuracy": 60 + 30 * size} for size in (0.1, 0.25, 0.5, 1.0)]
    slider = explored(net.selector, measured, "a small CNN")
    several = {**exhibit("table-1", "dots"), "explorers": [{**slider, "title": "one"}, {**slider, "title": "another"}]}
    exhibits = [exhibit("beyond", "lines", slider), exhibit("2d", "bars"), several]
    found = Found(exhibits=exhibits, missing=["2a"])
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(found, "Measured again"))
    return path.as_uri()


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    if not any(RECORDS.glob("**/exhibits/*.json")):
        pytest.skip(f"no records: {RECORDS} has no exhibits")
    path = tmp_path_factory.mktemp("records") / "report.html"
    path.write_text(page(find(RECORDS), "Measured again"))
    return path.as_uri()


@pytest.fixture(params=WIDTHS)
def browser(request, tmp_path):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    width, height = WIDTHS[request.param]
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": request.param == "phone"},
    )
    driver.shape = request.param
    yield driver
    driver.quit()


def opened(browser, address, scheme="light"):
    # Without motion: a click comes where the page is going to, not where it is on its way.
    wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wanted.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(address)
    ready = "return document.documentElement.dataset.ready"
    WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(ready) == "yes")
    return browser


def shot(browser, name):
    SHOTS.mkdir(exist_ok=True)
    browser.save_screenshot(str(SHOTS / f"{name}-{browser.shape}.png"))


def test_figures_show_and_nothing_is_complained_of(browser, address):
    opened(browser, address)
    figures = browser.find_elements(By.CSS_SELECTOR, ".figure")
    assert len(figures) == 9  # two for each of three sliders, one for each exhibit
    for figure in figures:
        assert figure.find_elements(By.CSS_SELECTOR, "svg.main-svg")
        assert figure.size["height"] > 150
    lines = browser.find_elements(By.CSS_SELECTOR, "[data-figure='0/0'] .scatterlayer .trace")
    assert len(lines) == 6
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    shot(browser, "light")


def assert_nothing_is_wider(browser):
    widths = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert widths[0] <= widths[1]


def test_nothing_is_wider_than_the_window(browser, address):
    opened(browser, address)
    assert_nothing_is_wider(browser)


def colours(browser):
    """Of every figure, the colour of each of its series."""
    return browser.execute_script("""
        return [...document.querySelectorAll('[data-figure]')].map((place) => [place.dataset.figure,
            place.data.filter((trace) => trace.meta !== 'band').map((trace) => trace.marker.color)]);
    """)


def assert_all_apart(browser):
    for figure, found in colours(browser):
        values = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in found]
        for one, other in combinations(values, 2):
            assert math.dist(one, other) > APART, (figure, found)


def assert_a_name_has_one_colour(browser):
    """In all figures of an exhibit: Z = 0.5, for instance, in both of 2a's."""
    found = browser.execute_script("""
        return [...document.querySelectorAll('[data-figure]')].flatMap((place) => place.data
            .filter((trace) => trace.meta !== 'band')
            .map((trace) => [place.dataset.figure.split('/')[0] + ' ' + trace.name, trace.marker.color]));
    """)
    by_name = {}
    for name, colour in found:
        assert by_name.setdefault(name, colour) == colour, name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_series_of_a_figure_have_the_same_colour(browser, address, scheme):
    opened(browser, address, scheme)
    assert [len(found) for _, found in colours(browser)] == [6, 3, 2]
    assert_all_apart(browser)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_records_of_this_project_are_drawn(browser, records, scheme):
    """All that is shown there: no complaint, every line in its figure, and colours that can be told apart."""
    opened(browser, records, scheme)
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert_nothing_is_wider(browser)
    assert_all_apart(browser)
    assert_a_name_has_one_colour(browser)
    drawn = browser.execute_script("""
        return [...document.querySelectorAll('.figure')].map((place) => [
            place.querySelectorAll('.scatterlayer .trace, .barlayer .trace').length, (place.data || []).length,
            place.clientHeight, place.querySelector('svg.main-svg').getBoundingClientRect().width - place.clientWidth]);
    """)
    assert len(drawn) > 10
    for number, expected, height, beyond in drawn:
        assert number == expected > 0
        assert height > 150
        assert beyond <= 1
    shot(browser, f"records-{scheme}")


def test_dots_have_their_rows_and_the_papers_are_hollow(browser, address):
    opened(browser, address)
    place = browser.find_element(By.CSS_SELECTOR, "[data-figure='2/0']")
    rows = place.find_elements(By.CSS_SELECTOR, ".ytick text")
    assert [row.text.split()[0] for row in sorted(rows, key=lambda row: row.location["y"])] == ["Decomposable-Net", "a"]
    ours, paper = browser.execute_script("return arguments[0].data.map((trace) => trace.marker.symbol)", place)
    assert paper.endswith("-open")
    assert not ours.endswith("-open")
    assert place.find_elements(By.CSS_SELECTOR, ".errorbars path.xerror")
    said = browser.execute_script("return arguments[0].data[0].hovertext[0]", place)
    assert said == "here<br>Decomposable-Net<br>test accuracy: 90% (89.5 to 90.5 over the seeds)"


def test_where_an_axis_leaves_something_out_it_is_said_and_can_be_seen(browser, tmp_path):
    shown = exhibit("2b", "lines")
    shown["figures"][0]["series"][0] |= {"y": [90, 90, 89, 88, 60, 20, 10], "low": [89, 89, 88, 87, 50, 15, 10]}
    path = tmp_path / "report.html"
    path.write_text(page(Found(exhibits=[shown]), "Far below"))
    opened(browser, path.as_uri())
    bottom = "return document.querySelector('[data-figure]')._fullLayout.yaxis.range[0]"
    note = browser.find_element(By.CSS_SELECTOR, ".end")
    end = browser.execute_script(bottom)
    assert f"The axis ends at {end}%; some lines go on below it." in note.text
    ends = [min(sorted(one["y"])[-2:]) for one in shown["figures"][0]["series"]]
    assert end < min(ends)  # two points of every line at least
    button = note.find_element(By.TAG_NAME, "button")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button)
    button.click()
    assert browser.execute_script(bottom) < 10
    assert "All of every line is shown." in note.text


def reading(browser, name):
    return browser.find_element(By.CSS_SELECTOR, f"[data-reading={name}]").text


def test_the_slider_is_followed_by_keyboard_and_by_hand(browser, address):
    opened(browser, address)
    slider = browser.find_element(By.CSS_SELECTOR, "input[type=range]")
    names = ("size", "accuracy", "macs", "params")
    bars = "return [...document.querySelectorAll('.explorer .barlayer path')].map(p => p.getAttribute('d')).join()"
    seen = [({name: reading(browser, name) for name in names}, browser.execute_script(bars))]
    for key in (Keys.END, Keys.HOME, Keys.ARROW_RIGHT):
        slider.send_keys(key)
        seen.append(({name: reading(browser, name) for name in names}, browser.execute_script(bars)))
    assert seen[1][0]["size"] == "1.000×"
    assert seen[1][0]["accuracy"] == "90.0%"
    assert float(seen[2][0]["accuracy"].rstrip("%")) == pytest.approx(63.0, abs=0.5)
    assert len({json.dumps(each) for each, _ in seen}) == 4
    assert len({drawn for _, drawn in seen}) >= 3
    assert "percent" in slider.get_attribute("aria-valuetext")
    browser.execute_script("arguments[0].value = 30; arguments[0].dispatchEvent(new Event('input'))", slider)
    assert reading(browser, "size") != seen[3][0]["size"]


def test_dark_mode_and_print_are_readable(browser, address):
    """Text and ground lie far apart, in figures too."""
    contrast = """
        const luminance = (c) => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(Number).map(x => x / 255)
            .map(x => x <= 0.04 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
            return 0.2126*v[0] + 0.7152*v[1] + 0.0722*v[2]; };
        const ground = luminance(getComputedStyle(document.body).backgroundColor);
        const of = (selector) => getComputedStyle(document.querySelector(selector));
        const inks = [of('body').color, of('.where').color, of('.xtick text').fill, of('.verdict').color];
        return inks.map(luminance).map(l => (Math.max(l, ground) + 0.05) / (Math.min(l, ground) + 0.05));
    """
    lines = contrast.replace(
        contrast[contrast.index("const inks") : contrast.index("return inks")],
        "const inks = [...document.querySelectorAll('[data-figure] .js-line')].map(e => "
        "getComputedStyle(e)).map(s => s.stroke === 'none' ? s.fill : s.stroke).filter(c => c.startsWith('rgb('));",
    )
    for scheme in ("light", "dark"):
        opened(browser, address, scheme)
        assert min(browser.execute_script(contrast)) > 4.0, scheme
        assert min(browser.execute_script(lines)) > {"light": 3.0, "dark": 4.5}[scheme], scheme
        shot(browser, scheme)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "light"}]},
    )
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not browser.find_element(By.CSS_SELECTOR, ".explorer input").is_displayed()
    # From a dark screen, too: what is folded is opened, and figures are drawn for white paper.
    opened(browser, address, "dark")
    ink = "return getComputedStyle(document.querySelector('.xtick text')).fill"
    dark = browser.execute_script(ink)
    folded = "return document.querySelectorAll('details:not([open])').length"
    assert browser.execute_script(folded) > 0
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(folded) == 0
    assert browser.execute_script(ink) == "rgb(68, 68, 68)"
    browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(folded) > 0
    assert browser.execute_script(ink) == dark


def test_what_holds_is_seen_at_a_glance(browser, address):
    opened(browser, address)
    counts = {
        each.find_element(By.CSS_SELECTOR, ".of").text: [b.text for b in each.find_elements(By.TAG_NAME, "b")]
        for each in browser.find_elements(By.CSS_SELECTOR, ".counts")
    }
    assert counts == {"The paper's claims": ["2", "0", "2", "0"], "This project's own goals": ["1", "0", "1", "0"]}
    rows = browser.find_elements(By.CSS_SELECTOR, ".overview li")
    for row in rows[:3]:
        marks = row.find_elements(By.CSS_SELECTOR, "a.mark")
        assert [mark.text for mark in marks] == ["✓", "✗"]
        assert [each.text for each in row.find_elements(By.CSS_SELECTOR, ".network")] == ["a network"]
        assert row.text.startswith("figure 2 ")
    assert rows[3].text.endswith("not measured")
    summary = browser.find_element(By.CSS_SELECTOR, ".failing summary")
    assert summary.text == "What does not hold here, or in part (3)"
    failing = browser.find_elements(By.CSS_SELECTOR, ".failing li")
    assert not any(each.is_displayed() for each in failing)
    summary.click()
    assert [each.text for each in failing] == ["does not hold Another one, which does not. a network"] * 3
    headings = [each.text for each in browser.find_elements(By.CSS_SELECTOR, ".failing h3")]
    assert headings == ["Of the paper's claims (2)", "Of this project's own goals (1)"]
    assert browser.find_element(By.CSS_SELECTOR, ".remarks").text.endswith("One seed has no range.")


def test_a_sign_leads_to_its_claim(browser, address):
    """For fingers, which have no tooltips."""
    opened(browser, address)
    sign = browser.find_elements(By.CSS_SELECTOR, ".overview a.mark")[3]
    assert sign.accessible_name == "does not hold: Another one, which does not. (a network)"
    sign.click()
    claim = browser.find_element(By.CSS_SELECTOR, ".claims li:target")
    assert claim.text.startswith("does not hold\nAnother one")
    WebDriverWait(browser, 5).until(
        lambda driver: driver.execute_script(
            "const r = arguments[0].getBoundingClientRect(); return r.top >= 0 && r.bottom <= innerHeight", claim
        )
    )
