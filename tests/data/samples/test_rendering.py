"""Chat templates run in transformers' sandbox, and whatever they do wrong is one failure with a
message.
"""

import pytest

from mmtrain.data.samples.chat import JinjaTemplate, TemplateError

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
            "writes more than 10,000,000 characters",
        ),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('no tools') }}", "no tools"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages[0].content.nothing.at_all }}", "no attribute"),
        ("{% if %}", "Expected an expression"),
        ("{{ " + "(" * 10000 + "1" + ")" * 10000 + " }}", "recursion"),
        ("{% for i in [1] %}" * 50 + "{% endfor %}" * 50, "nested"),
    ],
)
def test_what_a_template_does_wrong_is_a_failure_that_says_so(text, words):
    with pytest.raises(TemplateError, match=words):
        JinjaTemplate(text).render(MESSAGES, {})


def test_a_long_conversation_is_rendered_whatever_its_length():
    message = {"role": "user", "content": "word " * 2000}
    text = "{% set ns = namespace(text='') %}{% for message in messages %}\
{% set ns.text = ns.text + message['role'] + ': ' + message['content'].strip() + '\n' %}{% endfor %}{{ ns.text }}"
    written = JinjaTemplate(text).render([message] * 500, {"messages": "a token that is called so"})
    assert written == ("user: " + ("word " * 2000).strip() + "\n") * 500
