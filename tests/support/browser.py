"""Pages in a real browser, headless."""

from __future__ import annotations

import asyncio
import shutil
import tempfile

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
MISSING = "no chromium here (apt-get install chromium)"


async def drawn(url: str, *flags: str) -> tuple[str, str]:
    """(DOM, console lines) of the page after it has been up for three virtual seconds."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = await asyncio.create_subprocess_exec(
            str(BROWSER),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
            f"--user-data-dir={profile}",
            "--window-size=1280,900",
            "--enable-logging=stderr",
            "--virtual-time-budget=3000",
            *flags,
            "--dump-dom",
            url,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(browser.communicate(), 90)
        finally:
            if browser.returncode is None:
                browser.kill()
    console = [line for line in err.decode().splitlines() if "CONSOLE" in line]
    return out.decode(), "\n".join(console)
