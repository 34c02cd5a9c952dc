"""Chat templates that loop or allocate without end are given up soon, in little memory; what they ask is counted."""

import json
import subprocess
import sys

import pytest

from mmtrain.data.samples.bounded_jinja import BoundedTemplate, TooMuchWork

LOOP = "{% for a in range(100000) %}"
GROW = "{% set ns = namespace(x='a' * 1000) %}" + LOOP + "{% set ns.x = GROWN %}{% endfor %}{{ ns.x }}"
HOSTILE = {
    "a long range": "{% for i in range(10**12) %}{% endfor %}",
    "nested loops": LOOP * 4 + "{% endfor %}" * 4,
    "loops in a recursive loop": "{% for i in range(100000) recursive %}{{ loop(range(100000)) }}{% endfor %}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a macro that calls itself twice": "{% macro f(n) %}{{ n and f(n-1) ~ f(n-1) }}{% endmacro %}{{ f(60) }}",
    "a long text": "{{ 'a' * 10**10 }}",
    "a long list": "{{ ([0] * 10**10) | length }}",
    "a high power": "{% set ns = namespace(x=9) %}" + LOOP + "{% set ns.x = ns.x ** 9 %}{% endfor %}",
    "squares of squares": "{% set ns = namespace(x=9) %}" + LOOP + "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubled by +": GROW.replace("GROWN", "ns.x + ns.x"),
    "doubled by ~": GROW.replace("GROWN", "ns.x ~ ns.x"),
    "doubled by a block": "{% set x = 'aaaa' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "a list of itself twice": GROW.replace("GROWN", "[ns.x, ns.x]"),
    "a dict of itself twice": GROW.replace("GROWN", "dict(a=ns.x, b=ns.x)"),
    "the filter center": "{{ 'a' | center(10**10) }}",
    "the filter center of constants": "{{ 'a' | center(10000000000) }}",
    "the method ljust": "{{ 'a'.ljust(10**10) }}",
    "the filter indent": "{{ ('a\n' * 10000) | indent(10**9) }}",
    "the filter batch": "{{ [1] | batch(10**10, 'x') | list }}",
    "the filter tojson": "{{ [1] | tojson(indent=10**10) }}",
    "a mapped filter": "{{ range(100000) | map('center', 100000) | join }}",
    "a filter block": "{% filter center(10**10) %}a{% endfilter %}",
    "replace": "{% set x = 'a' * 100000 %}{{ x.replace('', x) }}",
    "join": "{{ range(100000) | map('string') | join('a' * 100000) }}",
    "a width in %": "{{ '%10000000000d' % 1 }}",
    "a width beside %": "{{ '%*d' % (10**10, 1) }}",
    "a width in format": "{{ '{:10000000000}'.format(1) }}",
    "a width beside format": "{{ '{:{}}'.format(1, 10**10) }}",
    "a long comparison": "{% set x = range(100000) | list %}" + LOOP + "{% if x == x[:] %}{% endif %}{% endfor %}",
    "on many messages alone": "{% if messages | length > 7 %}" + LOOP * 3 + "{% endfor %}" * 3 + "{% endif %}",
}
NO_TEMPLATE = {
    "10,000 brackets": "{{ " + "(" * 10000 + "1" + ")" * 10000 + " }}",
    "1,000 conditions": "{% if 1 %}" * 1000 + "{% endif %}" * 1000,
    "50 loops": "{% for i in [1] %}" * 50 + "{% endfor %}" * 50,
    "a megabyte": "x" * 1_000_000,
}
RENDER = """
import json, resource, sys, time
import jinja2
from mmtrain.data.samples.bounded_jinja import BoundedTemplate
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
messages = [{"role": "user", "content": "hello"}] * 8
for text in json.load(sys.stdin):
    began = time.process_time()
    try:
        said = "rendered " + BoundedTemplate(text).render(messages)[:20]
    except jinja2.TemplateError as error:
        said = f"{type(error).__name__}: {error}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([said, time.process_time() - began, peak * 1024]), flush=True)
"""


def test_templates_without_end_are_given_up_within_5_seconds_and_half_a_gigabyte():
    texts = [*HOSTILE.values(), *NO_TEMPLATE.values()]
    ran = subprocess.run(
        [sys.executable, "-c", RENDER], input=json.dumps(texts), capture_output=True, text=True, timeout=200
    )
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(results) == len(texts), ran.stderr[-500:]
    named = dict(zip([*HOSTILE, *NO_TEMPLATE], results, strict=True))
    assert {name: said for name, (said, _, _) in named.items() if not said.startswith("T")} == {}
    assert {name for name in HOSTILE if not named[name][0].startswith("TooMuchWork: ")} == set()
    assert {name: seconds for name, (_, seconds, _) in named.items() if seconds > 5} == {}
    assert results[-1][2] < 2**29


def test_a_long_conversation_is_rendered_whatever_its_length():
    one = {"role": "user", "content": "word " * 2000}
    text = "{% set ns = namespace(text='') %}{% for message in messages %}\
{% set ns.text = ns.text + message['role'] + ': ' + message['content'].strip() + '\n' %}{% endfor %}{{ ns.text }}"
    written = BoundedTemplate(text).render([one] * 500)
    assert written == ("user: " + ("word " * 2000).strip() + "\n") * 500


def test_the_same_work_is_refused_every_time_and_leaves_the_template_usable():
    template = BoundedTemplate("{% for i in range(messages[0].times) %}" + LOOP + "{% endfor %}{% endfor %}done")
    for _ in range(2):
        with pytest.raises(TooMuchWork):
            template.render([{"times": 1000}])
        assert template.render([{"times": 1}]) == "done"
