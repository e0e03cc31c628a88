"""Events whose surroundings are encoded once."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from drumline.frontend.web.template import EventTemplate

texts = st.text(st.characters(exclude_categories=("Cs",)))


@given(texts, texts, texts)
def test_a_template_filled_is_the_event_encoded(before, text, after):
    def body(text):
        return {"a": before, "text": text, "b": [after, text[:0]]}

    assert EventTemplate(body).filled(text) == msgspec.json.encode(body(text))
