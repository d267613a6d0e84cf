"""Sentences, words in capitals and the language of a text, by rules: nothing is downloaded."""

# ruff: noqa: RUF001 (letters of other scripts)

import re
import unicodedata
from collections import Counter

_SENTENCE_END = re.compile(r"(\S*?)([.?!]+)[\"'”’)\]*_]*\s+[\"'“‘(\[*_]*(?=(\S))")
# Abbreviations before names, and so within sentences; those that may end one.
_TITLES = set("mr mrs ms dr prof st gen rep sen gov col capt lt sgt rev hon vs".split())
_INSIDE = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]|etc|inc|ltd|co|corp|jr|sr|al|cf|ca|no|fig|vol|eq|approx")
_TOKEN = re.compile(r"[^\s,;:@#$%&?!()\[\]{}<>\"“”`]+")
_CONTRACTION = re.compile(r"(?=(?:n't|'(?:s|m|d|ll|re|ve))$)", re.IGNORECASE)
_AROUND = ".,;:!?…\"'“”‘’„«»()[]{}*_-–—।॥،؛؟¿¡"
# The commonest words of each language, by its script as Unicode names it; the first one where none occurs.
LANGUAGES = {
    "LATIN": {
        "en": "the and of to in is that it for you with this are was be on as have not",
        "de": "der die und das ist nicht ein eine ich zu mit den sie von auf für es dem im",
        "fr": "le les et des est une dans que pour qui pas sur du au il je vous avec",
        "es": "el los que y una en es por con del las se no su para lo como más",
        "it": "il di che è un per non sono una della nel con gli si ma del più anche",
        "pt": "o de que e não uma um para com os é do da em se mas no na por",
        "fi": "ja on ei se että hän oli mutta ovat minä kun niin myös joka kuin ole",
        "vi": "và là của có không một cho tôi trong được những với các người này để",
        "sw": "na ya wa kwa ni katika za la kuwa hii yake kama si sana ambayo hiyo",
    },
    "CYRILLIC": {
        "ru": "и в не на что я с он как это по но они к у из за так все",
        "bg": "и на да се за не са от е в с по ще като това до аз ги си",
    },
    "ARABIC": {
        "ar": "في من على أن إلى التي هذا ما لا هو كان عن مع هذه الذي كل",
        "fa": "در به از که این را با است و می برای آن یک تا هم بر شما",
        "ur": "کے میں کی ہے اور سے کا کو پر نے یہ کہ ہیں ایک بھی نہیں",
    },
    "DEVANAGARI": {
        "hi": "है के में की और से का को पर नहीं हैं एक यह भी कि हो",
        "mr": "आहे आणि या हे मी ते नाही आहेत एक तर व हा ही होते तो त्या",
        "ne": "छ र मा हो छन् लागि गर्न यो पनि एक भने हुन् थियो हुन्छ गर्छ यस",
    },
    **{"HANGUL": {"ko": ""}, "THAI": {"th": ""}, "KANNADA": {"kn": ""}, "GURMUKHI": {"pa": ""}},
    **{"TELUGU": {"te": ""}, "GUJARATI": {"gu": ""}, "TAMIL": {"ta": ""}, "BENGALI": {"bn": ""}},
    **{"GREEK": {"el": ""}, "HEBREW": {"he": ""}, "HIRAGANA": {"ja": ""}, "CJK": {"zh-cn": ""}},
}
KNOWN = {code for languages in LANGUAGES.values() for code in languages}


def sentences(text: str) -> int:
    """The number of sentences: they end with . ? or ! before white space, not after an initial, a title or
    an abbreviation (before a small letter)."""

    def ends(match: re.Match) -> bool:
        word, marks, following = match.groups()
        word = word.lstrip("\"'“‘([*_").lower()
        if marks != "." or not word:
            return True
        if word in _TITLES or (len(word) == 1 and word.isalpha() and word != "i"):
            return False
        return not (_INSIDE.fullmatch(word) and (following.islower() or following.isdigit()))

    return bool(text.strip()) + sum(map(ends, _SENTENCE_END.finditer(text)))


def capitals(text: str) -> int:
    """The number of words in capitals, as the Penn Treebank cuts words: DON'T is two."""
    return sum(part.isupper() for word in _TOKEN.findall(text) for part in _CONTRACTION.split(word))


def language(text: str) -> str | None:
    """The code of a text's language, one of `KNOWN`, by its script and then by its commonest words; None
    without a letter of a known script."""
    scripts = Counter(unicodedata.name(letter, "").partition(" ")[0] for letter in text if letter.isalpha())
    known = [script for script, _ in scripts.most_common() if script in LANGUAGES]
    if not known:
        return None
    script = "HIRAGANA" if known[0] == "CJK" and "HIRAGANA" in known else known[0]
    counts = Counter(word.strip(_AROUND) for word in text.lower().split())
    return max(LANGUAGES[script], key=lambda code: sum(counts[w] for w in LANGUAGES[script][code].split()))
