"""Text that breaks tokenizers: what each group is for is in its name."""

WORDS = (
    "The quick brown fox jumps over the lazy dog.",
    "I'll say it's what they've done, we're sure he'd agree; DON'T SHOUT, I'M HERE.",
    "snake_case camelCase SCREAMING_CASE kebab-case a.b.c/d\\e",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
)
UNICODE = (
    "Grüße aus Köln, naïve façade, Ångström, cafe\u0301 against café",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया",
    "你好，世界。こんにちは世界。안녕하세요 세계. สวัสดีชาวโลก",
    "ﬁ ligature, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢, z\u0351\u036b\u0343a\u0363l\u0311g\u0301o",
    "null\x00byte, bell\x07, escape\x1b[31mred\x1b[0m, delete\x7f, next line\x85end",
    "zero\u200bwidth, soft\u00adhyphen, right\u202eto left, byte order\ufeffmark, replacement \ufffd",
    "private \ue000 use, noncharacter \ufdd0, last \U0010ffff",
)
EMOJI = (
    "🙂🙃 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ❤️‍🔥 1️⃣ end",
    "text🙂text 🙂 text",
)
SPACES = (
    "",
    " ",
    "  ",
    "   leading and trailing   ",
    "tabs\t\tand\tspaces \t mixed \t",
    "\n",
    "\n\n\n",
    "line\r\nline\rline\n  indented\n\n\ttabbed",
    "many" + " " * 33 + "spaces",
    "no\u00a0break, thin\u2009space, ideographic\u3000space, line\u2028separator",
)
DIGITS = (
    "0 1 12 123 1234 12345 1234567890",
    "3.14159, 1,000,000, 1e-9, 0xDEADBEEF, v1.2.3-rc4, 2024-02-29T23:59:60Z",
    "a1b2c3 7up 42nd 一二三",
)
CODE = (
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # comment\n\n\nclass A(B, metaclass=M):\n\tpass\n',
    '#include <stdio.h>\nint main(void) { for (int i = 0; i < 10; ++i) printf("%d\\n", i); }',
    "SELECT * FROM t WHERE a <> 'it''s' AND b >= 10; -- done",
    '<div class="x">&nbsp;&#39;</div><!-- --> {{ jinja }} {% if %} $PATH `ls` ~/.bashrc',
)
CONTROL_TOKENS = (
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>", "a<|im_end|>b <|im_end|> c", "<|im_start|", "<|im_end|>>", "< |im_end|>", "<repo_name><file_sep>",
    "<s>[INST] hi [/INST]</s> <unk> <0x0A>",
)  # fmt: skip
# Where it shows whether each digit is cut off before words and spaces are: spaces before digits, and
# digits outside ASCII.
DIGITS_APART = (
    "a  1",
    "x =    42",
    "\n\n7",
    "    1. first\n    2. second\n\t\t3",
    "|   12 |  345 |\n",
    "٠١٢٣٤ ১২৩, ½ ⅓ ², Ⅷ, ①",
)

ALL_BUT_DIGITS_APART = (*WORDS, *UNICODE, *EMOJI, *SPACES, *DIGITS, *CODE, *CONTROL_TOKENS)
EVERYTHING = (*ALL_BUT_DIGITS_APART, *DIGITS_APART)
