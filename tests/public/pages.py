"""The code blocks of README.md and docs/, and where each is run.

Every block of Python is run as printed, after those before it on its page, but for those that ELSEWHERE names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GPU: Final = "it needs a GPU: test_pages.py runs it where there is one"
VLLM: Final = "it needs vLLM: tests/vllm/test_pages.py runs it"
TRANSFORMERS: Final = "it needs transformers: tests/transformers/test_pages.py runs it"
DIFFUSERS: Final = "it needs diffusers: tests/diffusers/test_prompt_faults.py runs it"
CHECKOUT: Final = "tests/systemd/test_booted.py installs it in this way"
BOOTED: Final = "tests/systemd runs it under a real systemd"
STARTS: Final = "`make release-check` starts the daemon in this way"
PUBLISHED: Final = "tensord is in no package registry yet: test_pages.py checks that it has the extras"
SGLANG: Final = "it needs a GPU: tests/sglang/test_pages.py gives its words to SGLang's parser and factory"
SERVES: Final = "it installs and serves a model by gigabytes: tests/vllm/test_pages.py gives its words to vLLM's parser"
ELSEWHERE: Final = {
    ("README.md", "pip install ."): CHECKOUT,
    ("README.md", "tensord &"): STARTS,
    ("README.md", "vllm serve"): SERVES,
    ("README.md", "make demo"): "`make smoke` runs its examples, and test_pages.py checks the targets",
    ("docs/installing.md", "pip install ."): CHECKOUT,
    ("docs/quickstart.md", "tensord &"): STARTS,
    ("docs/diffusers.md", "pip install"): PUBLISHED,
    ("docs/diffusers.md", "import cached_prompts"): DIFFUSERS,
    ("docs/metrics.md", "localhost/metrics"): "test_pages.py asks a daemon's socket for the same page",
    ("docs/metrics.md", "localhost/readyz"): "test_pages.py asks a daemon's socket for the same page",
    ("docs/metrics.md", "tensord --metrics-listen"): "test_pages.py has the daemon check the flags",
    ("docs/metrics.md", "systemctl enable"): "it needs a booted systemd: tests/systemd/test_units.py checks the unit",
    ("docs/page.md", "tensord --http"): "test_pages.py has the daemon check the flags",
    ("docs/page.md", "ssh -L"): "it needs a second host: tests/integration/test_page.py asks the socket itself",
    ("docs/neighbours.md", "tensorctl room"): "tests/daemon/neighbours/test_room.py runs it",
    ("docs/pressure.md", "TorchDevice(0)"): GPU,
    ("docs/processor_cache.md", "vllm serve"): SERVES,
    ("docs/sglang.md", "sglang.launch_server"): SGLANG,
    ("docs/systemd.md", "-m venv /opt/tensord"): BOOTED,
    ("docs/systemd.md", "tensorctl purge"): BOOTED,
    ("docs/systemd.md", "--uninstall"): BOOTED,
    ("docs/systemd.md", "systemctl reset-failed"): BOOTED,
    ("docs/systemd.md", "systemctl restart tensord.socket"): BOOTED,
    ("docs/systemd.md", "-m venv ~/tensord"): "tests/systemd/test_user.py runs it under a user's service manager",
    ("docs/tensorctl.md", "_TENSORCTL_COMPLETE"): "it writes into the home of whoever runs it",
    ("docs/transformers.md", "pip install"): PUBLISHED,
    ("docs/transformers.md", "import cached"): TRANSFORMERS,
    ("docs/transformers.md", "import prefix_cached"): TRANSFORMERS,
    ("docs/transformers.md", "shared.past_key_values(ids)"): TRANSFORMERS,
    ("docs/vllm.md", "pip install"): SERVES,
    ("docs/vllm.md", "--enable-sleep-mode"): SERVES,
    ("docs/vllm.md", "--kv-transfer-config"): SERVES,
    ("docs/vllm.md", "from vllm import"): VLLM,
}
"""By its page and by words that only this block of the page has: why a block is not simply run."""


def sees_a_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


class Block(NamedTuple):
    """A code block: its page, the language after its fence, its number on the page from 0, and its text.

    `page` is the page's path from the root. The language "text" marks pictures and output, which nobody runs.
    """

    page: str
    language: str
    number: int
    text: str

    @property
    def elsewhere(self) -> str | None:
        """Why it is not simply run, if it is not."""
        reasons = [why for (page, words), why in ELSEWHERE.items() if page == self.page and words in self.text]
        return reasons[0] if reasons else None

    def run(self, names: dict[str, Any]) -> None:
        """Runs a block of Python as printed, with the names of those before it."""
        exec(compile(self.text, f"{self.page}, block {self.number}", "exec"), names)


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        name = str(page.relative_to(ROOT))
        found += [Block(name, language, number, text) for number, (language, text) in enumerate(fenced)]
    return found


def blocks_of(why: str) -> list[Block]:
    """Those that are not simply run for this reason; never none."""
    found = [block for block in blocks() if block.elsewhere == why]
    assert found, f"no block is run elsewhere because {why}"
    return found


def commands(block: Block) -> list[str]:
    """The commands of a block for the shell, without comments; one that goes over several lines is one."""
    lines = re.sub(r"\\\n *", "", block.text).splitlines()
    return [re.sub(r"(^| +)#.*", "", line) for line in lines]
