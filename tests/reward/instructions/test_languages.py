"""Languages by their script or by their frequent words."""

from __future__ import annotations

import pytest

from reward.instructions.languages import SCRIPTS, WORDS, language_of


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The cat is in the house and it is happy.", "en"),
        ("El gato está en la casa y es feliz con los niños.", "es"),
        ("O gato está em casa com os meninos, e não é uma surpresa.", "pt"),
        ("Der Hund ist nicht mit der Katze auf dem Dach.", "de"),
        ("Le chat est dans la maison et les enfants sont là.", "fr"),
        ("Kissa on talossa ja se ei ole ulkona.", "fi"),
        ("Con mèo không ở trong nhà và nó là của các em.", "vi"),
        ("Кошка и собака не в доме, это на улице.", "ru"),
        ("Котката е на покрива от сутринта и се радва за деня, но са там.", "bg"),
        ("बिल्ली घर में है और यह घर की है।", "hi"),
        ("मांजर घरात आहे आणि ते आनंदी आहे.", "mr"),
        ("گربه در خانه است و این را می داند.", "fa"),
        ("القط في البيت على السرير مع هذا الكلب.", "ar"),
        ("고양이는 집에 있다.", "ko"),
        ("猫は家にいます。", "ja"),
        ("猫在家里。", "zh"),
        ("పిల్లి ఇంట్లో ఉంది.", "te"),
        ("แมวอยู่ในบ้าน", "th"),
        ("ਬਿੱਲੀ ਘਰ ਵਿੱਚ ਹੈ।", "pa"),
        ("Zzz qqq", None),
        ("123 ...", None),
    ],
)
def test_the_language_of_a_text(text: str, language: str | None) -> None:
    assert language_of(text) == language


def test_languages_of_one_script_have_words() -> None:
    assert {name for names in SCRIPTS.values() if len(names) > 1 for name in names} == WORDS.keys()
