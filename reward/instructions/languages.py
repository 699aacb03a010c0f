"""The language of a text, by its script and by its most frequent words. Pure.

A script alone tells most of IFEval's languages apart. Those that share one are told by frequent short words, so a text of a few
words may be taken for a neighbour (Danish, Norwegian and Swedish, or Hindi, Marathi and Nepali); such a text has no language.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

SCRIPTS = {
    "ARABIC": ("ar", "fa", "ur"),
    "BENGALI": ("bn",),
    "CYRILLIC": ("ru", "bg", "uk", "mk"),
    "DEVANAGARI": ("hi", "mr", "ne"),
    "GREEK": ("el",),
    "GUJARATI": ("gu",),
    "GURMUKHI": ("pa",),
    "HANGUL": ("ko",),
    "HEBREW": ("he",),
    "HIRAGANA": ("ja",),
    "KATAKANA": ("ja",),
    "CJK": ("zh",),
    "KANNADA": ("kn",),
    "MALAYALAM": ("ml",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
    "THAI": ("th",),
    "LATIN": ("en", "de", "es", "fr", "it", "pt", "nl", "sv", "da", "no", "fi", "pl", "vi", "sw", "id", "tr", "ro", "cs", "hu"),
}  # fmt: skip
"""Languages by the first word of their letters' Unicode names."""

WORDS = {
    "ar": "في من على أن إلى هذا التي مع",
    "fa": "است این که را از به می های",
    "ur": "ہے میں کے کی اور سے کو یہ",
    "ru": "и в не на что это как для",
    "bg": "и на да се за от е са",
    "uk": "і на що не це та як для",
    "mk": "и на да се за од е во",
    "hi": "है में के की और से को यह",
    "mr": "आहे आणि या ते हे मध्ये आहेत ही",
    "ne": "छ र को मा यो छन् लागि हुन्छ",
    "en": "the of and to is in that it for you with are was this",
    "de": "der die und das ist nicht ein zu den mit von auf für",
    "es": "el la que de en los y un por las es con una para",
    "fr": "le la les et des est une que dans pour un vous du",
    "it": "il di che la è per un sono una della con non gli",
    "pt": "o que de não um uma para com os é do da em você",
    "nl": "de het een en van is dat niet op voor met zijn",
    "sv": "och att det som en är av för på inte med jag",
    "da": "og at det er en af til ikke på med jeg der",
    "no": "og det er som en av for ikke på med jeg til",
    "fi": "ja on ei se että ole olla kun mutta hän ovat tai",
    "pl": "i w nie na się że do jest to z jak o",
    "vi": "và của là có không cho một được các trong người với",
    "sw": "na ya kwa ni wa katika la za kama hii kuwa yake",
    "id": "dan yang di ini itu dengan untuk dari tidak pada adalah",
    "tr": "ve bir bu için da de ile çok olarak ne değil daha",
    "ro": "și de la în a pe cu un o este că nu",
    "cs": "a je se na že v to s do pro jako není",
    "hu": "a az és hogy nem egy is van ez meg volt mint",
}
WORD = re.compile(r"[^\W\d_]+(?:[\u0900-\u0DFF]*)")
MIN_WORDS = 2
"""Frequent words below which languages of one script are not told apart."""


def language_of(text: str) -> str | None:
    """Return the ISO 639-1 code of the language that most of a text is written in; None where that cannot be told."""
    scripts = Counter(_script(letter) for letter in text if letter.isalpha())
    if not scripts:
        return None
    if scripts["HIRAGANA"] + scripts["KATAKANA"]:
        scripts["HIRAGANA"] += scripts.pop("CJK", 0)
    languages = SCRIPTS.get(scripts.most_common(1)[0][0], ())
    if len(languages) <= 1:
        return languages[0] if languages else None
    counts = Counter(word.casefold() for word in re.findall(r"\S+", re.sub(r"[.,!?;:()\"«»،؟।]", " ", text)))
    found = sorted(
        ((sum(counts[word] for word in WORDS[language].split()), language) for language in languages),
        reverse=True,
    )
    is_clear = found[0][0] >= MIN_WORDS and found[0][0] > found[1][0]
    return found[0][1] if is_clear else None


def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]
