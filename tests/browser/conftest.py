"""One headless Chromium for all tests of the page; each test has a fresh tab and a router of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from tests.browser.person import Page
from tests.fakes.router_stack import write_text_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    binary, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("THE CHAT PAGE IS NOT TESTED: chromium or chromedriver is missing (apt install chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--window-size=1200,800",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def page(chromium: webdriver.Chrome) -> Iterator[Page]:
    first = chromium.current_window_handle
    chromium.get_log("browser")
    chromium.switch_to.new_window("tab")
    yield Page(chromium)
    chromium.close()
    chromium.switch_to.window(first)
