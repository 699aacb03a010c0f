"""Chat templates of the shapes that models have, and a tokenizer of characters for them."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"

HERMES = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{{- 'Tools:' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set asked = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content and loop.index0 > asked.last %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
"""Marks of Hermes and Qwen: results by order, reasoning since the last question, thinking on or off."""

FUNCTIONS = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Marks of Qwen 3 Coder."""

PYTHON_VALUES = FUNCTIONS.replace(
    "value if value is string else value | tojson",
    "value | tojson if value is mapping or (value is sequence and value is not string) else value | string",
)
"""The same with numbers, booleans and null as Python writes them, as in the first release of Qwen 3 Coder."""

JSON_CALLS = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}
{%- if m.tool_calls %}<|head|>assistant<|/head|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|im_end|>
{%- elif m.role == 'tool' %}<|head|>ipython<|/head|>

{{ m.content | tojson }}<|im_end|>
{%- else %}<|head|>{{ m.role }}<|/head|>

{{ m.content | trim }}<|im_end|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|head|>assistant<|/head|>

{% endif %}"""
"""The form of Llama 3: a message has a call or content, and the whole text is the call."""

IN_MESSAGE = """\
{%- for m in messages %}{% if 'tool_calls' in m %}[{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}]
{%- elif m.role == 'user' or m.role == 'assistant' or m.role == 'tool' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"""
"""Asks whether a message has the key of calls, as Llama 3's does: null would be a call."""

NONE_CALLS = """\
{%- for m in messages %}{% if m['content'] is none %}[{{ m['tool_calls'][0]['function']['name'] }}]
{%- else %}<{{ m['role'] }}>{{ m['content'] }}{% endif %}{% endfor %}"""
"""Writes calls where the content is none, as DeepSeek R1's distillations do."""

THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}{% endfor %}"
)
"""Has its own name for the reasoning, as gpt-oss does."""

WITH_IDS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% endfor %}<a>"
)
"""Writes the ids of results, calls in a form of its own, and no definitions of tools."""

EFFORT = "{% if reasoning_effort %}Effort: {{ reasoning_effort }}{% endif %}" + PLAIN


def character_tokenizer(template: str | None) -> Any:
    """Return a tokenizer with a token for each printable character, and `<|im_end|>` as the end."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = [*map(chr, range(33, 127)), *(byte_level.pre_tokenize_str(" \n€")[0][0])]
    vocabulary = {symbol: i for i, symbol in enumerate(dict.fromkeys(symbols))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)
