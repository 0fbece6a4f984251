"""Asks a llama.cpp server for the ids of 200 varied strings; test_tokenizer_files reads them.

llama-server -m SmolLM2-135M-Instruct.Q4_1.gguf --port 8080
python -m tests.backends.make_tokenizer_ids http://127.0.0.1:8080
"""

from __future__ import annotations

import json
import random
import sys
import urllib.request
from pathlib import Path

DATA = Path(__file__).parent / "data" / "tokenizer_ids.json"
NUM_TEXTS = 200
SEED = 20

WRITTEN = (
    "a",
    " ",
    "Hello, world!",
    "Hello  world   with    runs of     spaces",
    "don't can't I'm you're we've they'll she'd IT'S DON'T",
    "it’s a curly apostrophe — and a dash… “quoted”",
    "1234567890",
    "3.14159 and 1,000,000 and -42 and 0x1F and 1e-9",
    "½ ¾ ² ³ ① Ⅳ ٣ ४ ๕ 五 ，１２３",
    "year2024model3b v1.2.3-rc4+build.5",
    "CamelCaseAndsnake_case_and-kebab-case",
    "ALL CAPS SHOUTING",
    "你好，世界！今天天气怎么样？",
    "大语言模型的推理系统需要调度请求。",
    "中文English混排123数字，标点；符号。",
    "日本語の文章です。カタカナとひらがなと漢字。",
    "東京タワーは１９５８年に完成しました。",
    "한국어 문장입니다. 서울은 대한민국의 수도예요.",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "القرآن ١٢٣٤ بِسْمِ ٱللَّهِ",
    "שלום עולם, מה שלומך היום?",
    "בְּרֵאשִׁית בָּרָא אֱלֹהִים",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "क्षत्रिय १२३ ज्ञान",
    "สวัสดีชาวโลก วันนี้อากาศดีไหม ๑๒๓",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε",
    "Xin chào thế giới, hôm nay trời đẹp",
    "Ünïcödé çafé naïve Zürich Łódź Ærøskøbing",
    "e\u0301 n\u0303 combining against é ñ composed",
    "😀 😂🤣 ❤️ 👍🏽",
    "👨‍👩‍👧‍👦 👩🏿‍🚀 🏳️‍🌈 🏴‍☠️",
    "🇫🇷🇯🇵 flags 1️⃣2️⃣ keycaps",
    "∑ ∫ √ ≤ ≥ ≠ ∞ α β γ → ⇒ ∀x∈ℝ",
    "€ £ ¥ ₹ ₿ © ® ™ § ¶ † ‡",
    "def add(first, second):\n    return first + second\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n",
    "SELECT * FROM users WHERE id = 42 AND name LIKE '%o''brien%';",
    '<html><body class="a b">&nbsp;&amp;</body></html>',
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    'fn main() -> Result<(), Box<dyn Error>> { println!("{:?}", x?); Ok(()) }',
    "#!/bin/sh\nset -eu\necho \"$HOME\" | sed 's/a/b/g' > /dev/null 2>&1 &",
    "\\begin{equation} e^{i\\pi} + 1 = 0 \\end{equation}",
    "https://example.com/path?q=1&r=two#frag user@example.org",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "# Title\n\n* one\n* two\n\n```python\nprint(1)\n```\n",
    "tabs\tand\t\ttabs",
    "line\nline\n\nline\n\n\nline",
    "carriage\r\nreturn\r\nlines\r",
    "trailing spaces   ",
    "   leading spaces",
    "\n\n\n",
    "\t \t \n \r\n ",
    "no\u00a0break\u2003em\u2009thin\u3000ideographic\u202fnarrow\u200bzero",
    "line\u2028separator\u2029paragraph\u0085next\u000bvertical\u000cform",
    "\ufeffstarts with a byte order mark",
    "middle \ufeff of it",
    "\x00",
    "nul\x00inside\x00\x00and control \x01\x02\x1b[31m\x7f",
    "soft\u00adhyphen \u200e\u200fmarks \u202eoverride",
    "\ufffd replacement \ufffe \uffff",
    "\U0001d504\U0001d505 \U00012000\U00012001 \U000e0041\U0010ffff",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|endoftext|>",
    "text<|im_end|>glued<|im_start|> and spaced <|im_end|> ",
    "<repo_name>a/b<file_sep>c.py\n<jupyter_code>x<empty_output>",
    "<|im_start <|im_end| |im_end|> <im_end>",
    "".join(chr(code) for code in range(32, 127)),
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ababababababababab !!!!!!!!!!!! ???? .... ----- =====",
    "Pneumonoultramicroscopicsilicovolcanoconiosis antidisestablishmentarianism",
    "zzxqj vkwpq xqzjk",
)

# Planes 4 to 13 hold no characters, and the vocabulary has no token for the first byte of most of
# them: such text would lose bytes in any implementation.
_RANGES = (
    (0x20, 0x7E),
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x370, 0x52F),
    (0x5D0, 0x6FF),
    (0x900, 0xE7F),
    (0x2000, 0x27BF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1FAFF),
    (0x1, 0x3FFFF),
    (0xE0000, 0x10FFFF),
)
_SPICE = (" ", "  ", "\n", "\t", "\r\n", "7", "42", "'s", "'LL", "<|im_end|>", "\u200d", "\u3000")


def texts() -> list[str]:
    """The written strings, then random ones from a fixed seed."""
    draw = random.Random(SEED)
    random_texts = [_random_text(draw) for _ in range(NUM_TEXTS - len(WRITTEN))]
    return [*WRITTEN, *random_texts]


def _random_text(draw: random.Random) -> str:
    ranges = draw.sample(_RANGES, 3)
    pieces = []
    for _ in range(draw.randint(1, 30)):
        if draw.random() < 0.25:
            pieces.append(draw.choice(_SPICE))
        else:
            code = draw.randint(*draw.choice(ranges))
            pieces.append("" if 0xD800 <= code <= 0xDFFF else chr(code))
    return "".join(pieces) or "empty"


def ids_of(url: str, text: str) -> list[int]:
    body = {"content": text, "add_special": False, "parse_special": True}
    request = urllib.request.Request(
        f"{url}/tokenize", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        ids: list[int] = json.load(response)["tokens"]
    return ids


def main(url: str) -> None:
    rows = [json.dumps({"text": text, "ids": ids_of(url, text)}) for text in texts()]
    DATA.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    print(f"{len(rows)} strings written to {DATA}")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
