"""What is released builds, holds what it should and nothing else, and serves where it is installed.

`make release` runs this: it builds with tools of its own, fetched from the package index. The wheel
is built from the sdist, so both are known to work.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import tcb

pytestmark = pytest.mark.release
ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("python3.11", "python3.12", "python3.13")
SMOKE = """
import pathlib, sys, torch, transformers, tcb
assert pathlib.Path(tcb.__file__).is_relative_to(sys.prefix), tcb.__file__
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25,
)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0
prompts = [[1, 2, 3], list(range(4, 30))]
outputs = tcb.generate_batch(model, prompts, max_new_tokens=5, do_sample=False)
for prompt, output in zip(prompts, outputs.values(), strict=True):
    ids = torch.tensor([prompt])
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)[0, len(prompt):].tolist()
    assert output.generated_tokens == expected, (output, expected)
print("served", len(outputs), "prompts with tcb", tcb.__version__)
"""


def run(*command, cwd):
    """What a command printed; its errors, if it failed, are those of the test."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder, python=sys.executable):
    """The Python of a new environment without packages."""
    run(python, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel built from it; made of what git tracks, as in a fresh clone."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    tools = environment(folder / "tools")
    run(tools, "-m", "pip", "install", "--quiet", "build", cwd=folder)
    run(tools, "-m", "build", "--outdir", folder / "dist", source, cwd=folder)
    [sdist], [wheel] = (list((folder / "dist").glob(end)) for end in ("*.tar.gz", "*.whl"))
    return sdist, wheel


def test_names_carry_the_one_version(built):
    sdist, wheel = built
    assert sdist.name == f"tcb-{tcb.__version__}.tar.gz"
    assert wheel.name == f"tcb-{tcb.__version__}-py3-none-any.whl"


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = wheel.namelist()
        about = f"tcb-{tcb.__version__}.dist-info"
        metadata = Parser().parsestr(wheel.read(f"{about}/METADATA").decode())
        scripts = wheel.read(f"{about}/entry_points.txt").decode()
    tracked = run("git", "ls-files", "tcb", cwd=ROOT).splitlines()
    assert sorted(name for name in names if not name.startswith(about)) == sorted(tracked)
    assert "tcb/py.typed" in names
    assert f"{about}/licenses/LICENSE" in names
    assert metadata["Version"] == tcb.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    own = [item for item in metadata.get_all("Requires-Dist") if "extra ==" not in item]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert sorted(own) == sorted(project["dependencies"])
    assert "tcb = tcb." in scripts


def test_the_sdist_holds_what_builds_and_says_the_rest(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.split("/", 1)[-1] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "tcb/py.typed"} <= names


@pytest.mark.parametrize("python", PYTHONS)
def test_the_wheel_installs_and_imports_alone(built, tmp_path, python):
    found = shutil.which(python)
    if found is None or subprocess.run([found, "-V"], capture_output=True).returncode:
        pytest.skip(f"there is no {python} here")
    clean = environment(tmp_path / "clean", found)
    run(clean, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", built[1], cwd=tmp_path)
    printed = run(clean, "-c", "import tcb; print(tcb.__version__)", cwd=tmp_path)
    assert printed.strip() == tcb.__version__


def test_the_installed_wheel_serves(built, tmp_path):
    clean = environment(tmp_path / "clean")
    run(clean, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", built[1], cwd=tmp_path)
    # what it depends on is taken from here: a path in a .pth file brings packages, but not the
    # checkout that is installed beside them, so tcb is the wheel's
    home = Path(importlib.metadata.distribution("torch").locate_file("")).resolve()
    [packages] = (tmp_path / "clean" / "lib").glob("python*/site-packages")
    (packages / "depends.pth").write_text(f"{home}\n")
    assert "served 2 prompts" in run(clean, "-c", SMOKE, cwd=tmp_path)
    assert "generate" in run(clean.parent / "tcb", "--help", cwd=tmp_path)
