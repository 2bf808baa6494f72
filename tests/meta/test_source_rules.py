"""Rules for sources that no linter checks: nothing that runs bytes as code, no unfinished work, no machine's paths."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.meta.repository import own_files, own_python, package_python, parse, relative

_CODE_FROM_BYTES_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
_CODE_FROM_BYTES_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
}
_BINARY_SUFFIXES = {".png", ".jpg", ".svg", ".gguf", ".safetensors", ".ico", ".npz"}
_MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:root|work|workspace|home/\w+|Users/\w+)/")
_UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
_BARE_TYPE_IGNORE = re.compile(r"#\s*type:\s*ignore(?!\[[\w, -]+\]\s+#\s*\w)")


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def code_from_bytes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of whatever turns data into running code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] in _CODE_FROM_BYTES_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _CODE_FROM_BYTES_MODULES:
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call):
            if (name := _dotted(node.func)) in _CODE_FROM_BYTES_CALLS:
                yield node.lineno, name
            for keyword in node.keywords:
                unsafe = keyword.arg in {"allow_pickle", "shell", "trust_remote_code"}
                if unsafe and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
                    yield node.lineno, f"{keyword.arg}="


def unfinished(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of code that stands for code to come, or that hides every error."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if _dotted(raised) == "NotImplementedError":
                yield node.lineno, "NotImplementedError"
        elif isinstance(node, ast.ExceptHandler):
            everything = node.type is None or _dotted(node.type) in {"Exception", "BaseException"}
            if everything and all(isinstance(statement, ast.Pass) for statement in node.body):
                yield node.lineno, "an except clause that hides every error"


def _findings(path: Path, found: Iterator[tuple[int, str]]) -> list[str]:
    return [f"{relative(path)}:{line}: {what}" for line, what in found]


def test_nothing_turns_bytes_into_code() -> None:
    findings = [finding for path in own_python() for finding in _findings(path, code_from_bytes(parse(path)))]
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "eval(text)",
        "numpy.load(path, allow_pickle=True)",
        "subprocess.run(command, shell=flag)",
    ],
)
def test_each_way_to_turn_bytes_into_code_is_noticed(source: str) -> None:
    assert list(code_from_bytes(ast.parse(source)))


def test_evaluation_mode_of_a_module_is_no_finding() -> None:
    assert not list(code_from_bytes(ast.parse("model.eval()\nnumpy.load(path, allow_pickle=False)")))


def test_shipped_code_is_finished() -> None:
    findings = [finding for path in package_python() for finding in _findings(path, unfinished(parse(path)))]
    assert not findings, "\n".join(findings)


def test_unfinished_code_is_noticed() -> None:
    assert list(unfinished(ast.parse("def f():\n    raise NotImplementedError('later')")))
    assert list(unfinished(ast.parse("try:\n    f()\nexcept Exception:\n    pass")))
    assert not list(unfinished(ast.parse("try:\n    f()\nexcept KeyError:\n    pass")))


def test_every_type_ignore_names_its_error_and_reason() -> None:
    findings = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in own_python()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if _BARE_TYPE_IGNORE.search(line) and "_BARE_TYPE_IGNORE" not in line
    ]
    assert not findings, "write `# type: ignore[code]  # reason`:\n" + "\n".join(findings)


def test_no_file_has_a_machines_path_or_unfinished_notes() -> None:
    findings = []
    for path in own_files():
        if path.suffix in _BINARY_SUFFIXES:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if (match := _MACHINE_PATH.search(line) or _UNFINISHED.search(line)) and "re.compile" not in line:
                findings.append(f"{relative(path)}:{number}: {match[0]}")
    assert not findings, "\n".join(findings)


def test_patterns_notice_paths_and_notes() -> None:
    assert _MACHINE_PATH.search("open('" + "/ro" + "ot/x')")
    assert not _MACHINE_PATH.search("https://example.org/work/x and src/work/x")
    assert _UNFINISHED.search("# TO" + "DO: later")
