"""Chat templates: what they see, what they may do, and whose error it is when they fail."""

import time
from datetime import datetime

import pytest

from kvrelay.errors import InvalidRequest
from kvrelay.text.chat_template import ChatMessage, ChatTemplate
from kvrelay.text.tokenizer import Tokenizer

HELLO = [ChatMessage("user", "hello")]


def render(source: str, messages: list[ChatMessage] = HELLO, add_generation_prompt: bool = True) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, add_generation_prompt)


def test_smollm2_template_renders_as_the_model_was_trained(smollm2: Tokenizer) -> None:
    rendered = smollm2.render_chat([("user", "What is the capital of France?")])
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    own_system = smollm2.render_chat([("system", "Be brief."), ("user", "Hi")], add_generation_prompt=False)
    assert own_system == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_smollm2_chat_tokens_are_special_and_end_with_the_header(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode_chat([("user", "Hi")])
    assert token_ids.count(1) == 3
    assert token_ids.count(2) == 2
    assert smollm2.decode(token_ids, skip_special_tokens=False) == smollm2.render_chat([("user", "Hi")])


def test_template_sees_messages_special_tokens_and_the_flag() -> None:
    source = "{{ bos_token }}{{ messages[0]['role'] }}:{{ messages[0].content }}:{{ add_generation_prompt }}"
    assert render(source, add_generation_prompt=False) == "<s>user:hello:False"


def test_white_space_of_blocks_is_trimmed() -> None:
    assert render("  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\n") == "hello\n"


def test_loop_controls_and_generation_blocks_work() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source, [*HELLO, ChatMessage("user", "second")]) == "hello"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ messages[0].content | tojson }}", [ChatMessage("user", "<ü>")]) == '"<ü>"'


def test_date_is_available() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().astimezone().year)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses them"),
        ("{{ messages[7].content }}", "refuses them"),
        ("{{ 1 // 0 }}", "refuses them"),
        ("{{ none_such() }}", "none_such"),
    ],
)
def test_failing_template_is_the_messages_fault(source: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        render(source)
    assert caught.value.field == "chat.messages"


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one message"):
        render("x", [])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}{{ (messages.__class__.__base__).__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_sandbox_lets_nothing_out(source: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses them"):
        render(source)


def test_output_is_bounded() -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    template = ChatTemplate(source, {}, max_rendered_chars=10_000)
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match="longer than 10000 characters"):
        template.render(HELLO)
    assert time.monotonic() - started < 5


def test_one_long_piece_is_bounded_too() -> None:
    with pytest.raises(InvalidRequest, match="longer than"):
        ChatTemplate("{{ messages[0].content }}", {}, max_rendered_chars=3).render(HELLO)


@pytest.mark.parametrize("source", ["{{ 'x' * 1000000000000 }}", "{{ [0] * 9999999999 }}", "{{ 9 ** 9 ** 9 ** 9 }}"])
def test_short_templates_cannot_make_huge_values(source: str) -> None:
    with pytest.raises(InvalidRequest, match="small numbers"):
        render(source)


def test_numbers_can_be_multiplied() -> None:
    assert render("{{ loop_count * 2 if loop_count else 3 * 7 }}") == "21"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(999) %}{% for b in range(999) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set x = range(9999) | list %}{% for a in x %}{% for b in x if b == a %}{% endfor %}{% endfor %}",
        "{% macro m()%}{% for a in range(9999) %}{%endfor%}{% endmacro %}{% for a in range(999) %}{{m()}}{% endfor %}",
    ],
)
def test_loops_end_after_a_bounded_number_of_steps(source: str) -> None:
    started = time.process_time()
    with pytest.raises(InvalidRequest, match="loops take more than 1000000 steps"):
        ChatTemplate(source, {}).render(HELLO)
    assert time.process_time() - started < 5.0


def test_counted_loops_know_their_place() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}"
        "{% if not loop.first %}{{ loop.previtem.content }}{% endif %}{% else %}none{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
        "{% for x in nothing %}{{ x }}{% endfor %}"
    )
    turns = [ChatMessage("user", "x"), ChatMessage("user", "y")]
    assert ChatTemplate(source, {}).render(turns) == "1/2,2/2.xa1"
    assert ChatTemplate(source, {}).render(turns) == "1/2,2/2.xa1"  # steps are counted anew
