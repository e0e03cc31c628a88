"""What is drawn at random from the masks of the public suite's schemas validates.

A sample here; `make soak` walks through all of it, twenty times a schema
(`DRUMLINE_SOAK_WALKS=20`).
"""

import json
import os
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from drumline.contract.grammar import GrammarKey, GrammarKind
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.prepare import prepared

from .conftest import EOS
from .walks import Walker

SUITE = Path(__file__).parents[4] / "shared/data/json-schema-test-suite/tests"
RESULTS = Path(__file__).parents[3] / "benchmarks/results"
SEEDS = int(os.environ.get("DRUMLINE_SOAK_WALKS", "0"))
DRAFTS = {
    "draft7": jsonschema.Draft7Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
EVERY = 1 if SEEDS else 12
"""Of so many schemas one is walked."""


def cases():
    for draft in DRAFTS:
        for path in sorted((SUITE / draft).rglob("*.json")):
            for number, case in enumerate(json.loads(path.read_text())):
                yield draft, f"{draft}/{path.name}[{number}] {case['description']}", case["schema"]


SPACES = "\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"


def as_ecma_says(validator, pattern, instance, schema):
    """The keyword `pattern` as the language defines it: its classes are not Python's."""
    ours = pattern.replace(r"\s", f"[{SPACES}]").replace(r"\S", f"[^{SPACES}]")
    if validator.is_type(instance, "string") and not re.search(ours, instance, re.ASCII):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def fault(validator, text):
    """Return what is wrong with a text, or None."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return str(error)
    error = next(validator.iter_errors(value), None)
    return None if error is None else error.message


@pytest.mark.skipif(not SUITE.is_dir(), reason=f"no {SUITE}")
def test_every_schema_of_the_public_suite_is_refused_or_yields_what_validates(
    library, record_property
):
    walker = Walker(library.vocabulary, EOS)
    wrong, walks, ended, refused, taken, endless = [], 0, 0, [], 0, {}
    for index, (draft, where, schema) in enumerate(cases()):
        if index % EVERY:
            continue
        try:
            grammar = library.backend.compile(
                prepared(GrammarKey(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
            )
        except RefusedGrammarError as error:
            refused.append(f"{where}: {error}")
            continue
        taken += 1
        kind = jsonschema.validators.extend(DRAFTS[draft], {"pattern": as_ecma_says})
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        for seed in range(SEEDS or 2):
            text, done = walker.walk(grammar, np.random.default_rng([index, seed]))
            walks += 1
            ended += done
            if not done:
                endless.setdefault(where, text)
            elif why := fault(validator, text):
                wrong.append(f"{where}: {text.decode()!r}: {why}")
    figures = {
        "schemas": taken,
        "refused": len(refused),
        "walks": walks,
        "ended": ended,
        "wrong": len(wrong),
    }
    if SEEDS:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"walks-{library.name}.json").write_text(json.dumps(figures) + "\n")
    assert not wrong, "\n".join([f"{figures}:", *wrong])
    assert ended >= 0.95 * walks, endless
    # A library may not know a format that another one does, which it names.
    unnamed = [why for why in refused if " at #" not in why and "format" not in why]
    assert not unnamed, "\n".join(unnamed)
