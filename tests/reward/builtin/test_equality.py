"""Equality of answers: every form that gold answers of competition mathematics have, and work that is never done."""

from __future__ import annotations

import pytest

from paceline.reward.builtin.mathematics import equal_answers, math_accuracy

GOLDS: list[tuple[str, list[str], list[str]]] = [
    # gold answer, equal answers, other answers
    ("9", ["9.0", "+9", "9."], ["-9", "9.1", "90"]),
    (r"\frac{14}{3}", ["14/3", r"4\frac{2}{3}", "4.666667", r"\dfrac{14}{3}"], ["4.67", "-14/3", "14"]),
    (r"\left( 3, \frac{\pi}{2} \right)", [r"(3, \pi/2)", r"(3,\tfrac{\pi}2)"], [r"(\frac{\pi}{2},3)", "3"]),
    ("p - q", ["-q+p"], ["q-p", "p"]),
    (r"\text{Evelyn}", ["Evelyn", r"\textbf{Evelyn}"], ["Evan", r"\text{Evelyn and Bob}"]),
    (r"3\sqrt{13}", [r"\sqrt{117}", "3sqrt(13)", "10.816654"], [r"\sqrt{13}", r"3\sqrt{12}", "10.8"]),
    (r"\pi", ["π", "pi", "3.14159"], ["3.14", r"2\pi", "22/7"]),
    ("28", [r"28 \text{ cm}", "28 cm", r"28\,\mathrm{cm}^2", "28 eggs a day"], ["2.8", "28 hundredths"]),
    ("-2 + 7i", ["7i-2", "-2.0+7 i"], ["-2-7i", "2+7i", "-2"]),
    (r"145^\circ", ["145", "145 degrees", r"145^{\circ}", "145°"], ["-145", r"145\pi"]),
    ("[-2,7]", [r"\left[-2,7\right]", r"-2\le x\le 7", r"x\in[-2,7]"], ["(-2,7)", "[-2,7)", "[-2,8]"]),
    (
        r"(-\infty, 2) \cup (3, \infty)",
        [r"(3,\infty)\cup(-\infty,2)", r"\left(-\infty,2\right)\cup\left(3,+\infty\right)"],
        [r"(-\infty,2]\cup(3,\infty)", r"(-\infty,2)"],
    ),
    (r"[0,\infty)", [r"x\ge 0", r"0 \leq x", r"[0,+\infty)"], [r"(0,\infty)", "x>0"]),
    (r"[1,2)\cup[2,3]", ["[1,3]"], [r"[1,2)\cup(2,3]"]),
    (r"\mathbb{R} \setminus \{1\}", [r"(-\infty,1)\cup(1,\infty)"], [r"\mathbb{R}", r"(-\infty,1)"]),
    (r"\begin{pmatrix} -1 \\ 6 \end{pmatrix}", [r"\begin{bmatrix}-1\\ \frac{12}{2}\end{bmatrix}"], [r"\begin{pmatrix}-1&6\end{pmatrix}", "6"]),
    (
        r"\begin{pmatrix} 1/5 & 2/5 \\ -7 & 0 \end{pmatrix}",
        [r"\left(\begin{array}{cc}0.2&\frac25\\-7&0\\\end{array}\right)"],
        [r"\begin{pmatrix} 1/5 & 2/5 \\ 7 & 0 \end{pmatrix}"],
    ),
    ("1,-2", ["-2, 1", r"1 \text{ and } -2", r"\{1,-2\}", "x=1, x=-2"], ["1,2", "1", "-2"]),
    ("3, 5, 7", ["3,5,7", "5, 3 and 7", "3; 5; 7"], ["3,5", "3,5,8", "3,5,5"]),
    (r"5 \text{ and } 6", ["5, 6", "6 and 5"], ["5", "56"]),
    (r"\{1\pm\sqrt{5},-2\}", [r"1+\sqrt5, 1-\sqrt5, -2"], [r"1+\sqrt5,-2"]),
    (r"\frac{3 \pm \sqrt{2}}{7}", [r"\frac{3+\sqrt2}{7}, \frac{3-\sqrt2}7"], [r"\frac{3+\sqrt2}{7}"]),
    ("2516_8", ["2516_{8}", r"2516_{\text{eight}}"], ["2516", "1358", "2516_9"]),
    ("x^2 + 2x + 1", ["(x+1)^2", "x(x+2)+1", "X^2+2X+1"], ["x^2+2x-1", "x^2", "y^2+2y+1"]),
    ("6r^2-4r-24", ["2(3r^{2}-2r-12)"], ["6r^2-4r+24"]),
    ("x^2y^3", ["x^{2}y^{3}", "y^3x^2"], ["x^3y^2"]),
    ("a^2b^2c^2", ["(abc)^2"], ["abc"]),
    ("xyz", ["zyx", "x y z"], ["xy"]),
    ("6abc", [r"6 \cdot a b c"], ["abc"]),
    ("y = 2x + 3", ["2x+3", "2x - y + 3 = 0", "y=3+2x", "2x+3=y"], ["y=2x-3", "x=2y+3", "3"]),
    ("x=5", ["5", "x = 5.0", "5=x"], ["y=5", "x=-5"]),
    ("(x-5)^2+(y+2)^2=9", ["x^2-10x+y^2+4y+20=0"], ["(x-5)^2+(y+2)^2=3", "9"]),
    (r"x \le -3", [r"-3 \ge x", r"(-\infty,-3]", "x<=-3"], ["x<-3", r"x\ge-3", "-3"]),
    (r"\frac{1}{2} < x < 3", ["(1/2,3)", "3 > x > 1/2"], [r"1/2\le x<3"]),
    ("2x+3y<6", ["6>2x+3y", "-2x-3y>-6"], ["2x+3y>6"]),
    ("f(x) = 2x - 1", ["2x-1", "f(x)=-1+2x"], ["f(x)=2x+1"]),
    (r"\$18.90", ["18.90", "18.9", "18.90 dollars"], ["1.89", "18", "18.90 cents", "€18.90"]),
    (r"10\%", ["10", "0.1", "10 percent", "10%"], ["1", "100", "0.01"]),
    ("0.5", [r"50\%", "1/2", "½"], ["50", "5%"]),
    (r"\frac{2020!}{2018!}", [r"2020 \cdot 2019", "4078380"], ["2020", r"\frac{2020!}{2017!}"]),
    ("2^{2021}-1", [r"2 \cdot 2^{2020} - 1"], ["2^{2021}", "2^{2020}"]),
    (r"\frac{1}{2^{99}}", ["2^{-99}"], [r"\frac{1}{2^{98}}", "0"]),
    (r"11\frac{2}{3}", ["35/3", "11 2/3"], ["22/3", "11.7", "112/3"]),
    (r"-3\frac12", ["-3.5"], ["3.5", "-2.5"]),
    (r"3.6 \times 10^{5}", ["360000", r"3.6\cdot10^5", "3.6e5"], ["3.6", "36000"]),
    (r"1.2 \times 10^{-8}", ["1.2e-8", "0.000000012"], [r"1.2\times10^{-9}", "0", r"-1.2 \times 10^{-8}"]),
    ("1,000,000", ["1000000", "10^6", r"1{,}000{,}000", r"1\,000\,000", "1 million"], ["1000", "(1,000,000)"]),
    (r"10,\!080", ["10080", "10,080"], ["10", "80"]),
    ("1234.5", ["1,234.50", "1.234,5", "1234,5"], ["1.2345", "12345"]),
    ("3:30", [r"3\!:\!30", "3:30 p.m."], ["3:3", "30:3", "3"]),
    (r"5:00 \text{ p.m.}", ["5:00", r"5:00\text{ PM}"], [r"5:00\text{ a.m.}", "5:01"]),
    ("2:3", ["2 : 3"], ["3:2"]),
    (r"98^{\text{th}}", ["98", "98th", "98^{th}"], ["89"]),
    (r"\text{(C)}", ["C", "(C)", r"\textbf{(C)}"], ["(B)", "D"]),
    (r"\text{June 20}", ["June 20"], ["June 2", "20"]),
    (r"e^{i\pi/3}", [r"\frac12+\frac{\sqrt3}{2}i", r"\cos\frac{\pi}{3}+i\sin\frac{\pi}{3}"], [r"e^{-i\pi/3}"]),
    (r"\cos^2 x", [r"1-\sin^2 x", r"(\cos x)^2"], [r"\cos x", r"\cos x^2"]),
    (r"\log_2 10", [r"\frac{\ln 10}{\ln 2}", "3.321928"], ["3.32"]),
    (r"\sin 30^\circ", ["1/2"], [r"\sin 30"]),
    (r"0.\overline{27}", [r"\frac{3}{11}", "0.272727"], ["0.27"]),
    (r"\emptyset", [r"\varnothing", r"\{\}", r"\text{no solution}", "No solution"], ["0"]),
    (r"\operatorname{arcsin} x", [r"\arcsin x", r"\sin^{-1}(x)"], [r"\arccos x", r"\frac{1}{\sin x}"]),
    (
        r"\begin{cases} x & \text{if } x \ge 0 \\ -x & \text{otherwise} \end{cases}",
        [r"\begin{cases} x, & \text{if } x\geq 0, \\ -x, & \text{otherwise} \end{cases}"],
        [r"\begin{cases} -x & \text{if } x \ge 0 \\ x & \text{otherwise} \end{cases}"],
    ),
    ("(3,4,5)", [r"\langle 3,4,5\rangle", "3,4,5"], ["(3,5,4)", "(3,4)", r"\{3,4,5\}"]),
    (r"(-1,2),(3,4)", [r"(3,4),(-1,2)", r"(-1,2) \text{ and } (3,4)"], ["(2,-1),(3,4)", "(-1,2)"]),
    ("x=1, y=2", ["y=2, x=1", "(1,2)"], ["x=2,y=1"]),
    (r"20\,\text{m/s}", ["20", "20 m/s"], ["20 km/h", "2"]),
    (r"18\text{ cm}^2", ["18", "18 square centimeters"], ["18 cm", "81"]),
    (r"\sqrt[3]{4}", ["4^{1/3}", "1.587401"], [r"\sqrt4", "1.59"]),
    (r"\binom{10}{3}", ["120"], ["720"]),
    (r"\left\lfloor \frac{7}{2} \right\rfloor", ["3"], ["3.5"]),
    ("|x-3|", ["|3-x|", r"\sqrt{(x-3)^2}"], ["x-3"]),
    ("x_1 + x_2", ["x_{2}+x_{1}"], ["x_1", "2x"]),
    (r"\angle ABC", [r"\angle A B C"], [r"\angle ABD"]),
    (r"1 \pmod{7}", [], [r"1 \pmod{5}"]),
    (r"\int_0^1 f(x)\,dx", [r"\int_{0}^{1}f(x) dx"], [r"\int_0^2 f(x)\,dx"]),
    ("0", ["0.0", "-0", r"0^\circ"], ["0.0000001", "1e-9"]),
    (r"\infty", ["oo", "infinity"], [r"-\infty", "1"]),
]  # fmt: skip


def score(answer: str, gold: str) -> float | None:
    (reward,) = math_accuracy([""], [rf"Thus \boxed{{{answer}}}, as was to be shown."], answer=[gold])
    return reward


@pytest.mark.parametrize(("gold", "equal", "other"), GOLDS, ids=[gold for gold, _, _ in GOLDS])
def test_a_gold_answer_equals_itself_and_its_other_forms_alone(gold: str, equal: list[str], other: list[str]) -> None:
    assert {answer: score(answer, gold) for answer in [gold, *equal]} == dict.fromkeys([gold, *equal], 1.0)
    assert {answer: score(answer, gold) for answer in other} == dict.fromkeys(other, 0.0)


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("1e-7", "2e-7", False),  # an absolute tolerance: huggingface/Math-Verify#14
        ("1/4000000", "0", False),
        ("1/4000000", "2.5e-7", True),
        ("6.67e-11", "6.67e-9", False),
        ("0.0000003", "-0.0000001", False),
        ("0.0000001", "0", False),
        ("0", "0.0000001", False),
        ("1e-7", "0.0000001", True),
        ("10^{-7}", "10^{-8}", False),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
        ("1e-30", "1.0000001e-30", True),
        ("1e-30", "1.00001e-30", False),
        ("5e-7", "0", False),
        ("1/3", "0.333333", True),
        ("1/3", "0.333", False),
        ("-1/3", "-0.333333", True),
        ("-1/3", "0.333333", False),
        ("3.14159", r"\pi", True),
        ("3.14", r"\pi", False),
        (r"2000\pi", "6283.19", True),
        (r"2000\pi", "6283.1999", False),
        ("33.33333333", "33.3333", True),
        ("1234567.5", "1234567.9", False),
        ("0.30000000000000004", "0.3", True),
        ("18", "18.0000001", False),
        ("18.0", "18", True),
        ("299792458", "299792000", False),
        ("0.333333x", "x/3", True),
        ("0.333x", "x/3", False),
        (r"1.5\pi", "4.712389", True),
        ("-0.0", "0", True),
        ("1e400", "1e400", True),
    ],
)
def test_six_significant_digits_of_any_size_and_sign(gold: str, answer: str, equal: bool) -> None:
    assert equal_answers(gold, answer) is equal


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("2", "2 and a half", False),
        ("2", "2 times pi", False),
        ("5", "5 feet 6 inches", False),
        ("5 cm", "5 m", False),
        ("5 m/s", "5 m", False),
        ("3", "3t", False),
        ("18", "18 less than 20", False),
        ("36", "3 dozen", True),
        ("30", r"30^\circ\text{C}", False),
        (r"\frac{3}{4}", r"\frac{3}{4}\text{ cups}", True),
        (".5", "5", False),
        ("5!", "5", False),
        ("f'", "f", False),
        ("1 2", "12", False),
        ("3 1/2", "31/2", False),
        ("1,2,3", "123", False),
        ("1:2", "1/2", False),
        (r"\overline{AB}", "AB", False),
        (
            r"1 - \frac{1}{\mathrm{e}}",
            r"1 + \frac{1}{\mathrm{e}}",
            False,
        ),  # huggingface/Math-Verify#14, here to 69
        (r"19, 46, \text{ and } 82", "21, 36, and 82", False),
        ("n=2, 3, 4", "n=1, 2, 3", False),
        (r"D = (0, 1)", "D = (0, 1.5)", False),
        (r"\pm 2021", "2021", False),
        ("12:00", "1:00", False),
        (r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1", False),
        (r"1:2:3:\ldots", r"1:4:9:\ldots", False),
        (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}", False),
        (r"F_n = \sum_{k=0}^{n-1} F_k", r"F_n = \sum_{k=0}^{n-2} F_k", False),
        ("4", r"4\sqrt(2)", False),
        ("3x-y+13=0", "3x + 4y + 14=0", False),
        ("34x+45y-20z+100=0", "-34x-45y+20z-100=0", True),
        (r"\frac{1}{\sqrt{n}}", r"\sqrt{1/n}", True),
        ("e^{16} - 1", "-1 + exp(16)", True),
        ("14 - i", "14.0 + -1.0i", True),
        ("(0, 12.5)", "0 < x < 12.5", True),
        (r"\frac{x^2}{4}+\frac{y^2}{3}=1", r"\frac{x^2}{16}+\frac{y^2}{12}=1", False),
        (r"11,\! 111,\! 111,\! 100", "11111111100", True),  # rasbt/reasoning-from-scratch#133
        (
            r"\frac{12}{2\sqrt{25}}",
            r"{(3)(4) \over 2\sqrt{4+3(7)}}",
            True,
        ),  # OrangeX4/Latex-Sympy-Calculator#14
        (r"\frac{a}{b}", r"\frac a b", True),  # augustt198/latex2sympy#46
        ("4.3", "4,3", True),  # augustt198/latex2sympy#25
        ("4,3", "3,4", True),
        ("0,111", "0.111", True),
        ("9 a.m.", "9 AM", True),
        ("9 a.m.", "9 p.m.", False),
        (r"\text{5 hours}", "5 hours", True),
        (r"\text{5 hours}", r"5 \text{ minutes}", False),
        (r"\frac{NO}{BO} = 3", "3", True),
        ("|AB| = 1", "1", True),
        ("V_1:V_2 = 11:21", "11:21", True),
        ("0 < f(x) < 1", "(0,1)", True),
        (r"\\frac{1}{2} \\le x", r"x \ge 1/2", True),  # a text with the escapes of JSON
    ],
)
def test_nothing_is_left_out_of_an_answer_that_may_change_it(gold: str, answer: str, equal: bool) -> None:
    assert equal_answers(gold, answer) is equal


HOSTILE = [
    "9^{9^{9^9}}", "9**9**9", "2^{123456}", "99999!", "((9!)!)!", "1" * 1900, "(" * 5000, "{" * 5000, r"\frac{" * 500,
    r"\sqrt" * 600, "2^" * 600 + "2", "5" + "!" * 300, "+".join(["2^{20000}"] * 150), "*".join([r"\sin(2^{20000})"] * 60),
    r"\exp(\exp(\exp(1000)))", "10^{10^{10}}", r"\frac{1}{10^{-10^{10}}}", "1e99999999", r"\binom{100000}{50000}",
    r"\sum_{k=1}^{10^9} k", "0.\\overline{" + "3" * 900 + "}", ",".join(map(str, range(500))), r"\pm" * 300 + "1", "x^{1000000}",
    "(x+y)^{100000}", "x" * 1900, "|" * 300, "-" * 1900 + "1", "^" * 500, "x_" * 500, "a:" * 500 + "b", r"\begin{pmatrix}" * 50,
    "5 and " * 300 + "5", "(1," * 300, "0^{-1}", "1/0", r"\log_0 5", r"\sin(10^{300})", r"\sqrt[0]{2}",
    ",".join(f"2^{{{n}}}" for n in range(19000, 19060)),
    "x y " * 450, "-" * 900 + "1", "3" + "!" * 900, "½" * 900, "9!^" * 300 + "2", "x^-" * 400 + "2",
    r"\{" * 38 + "3" + r"\}" * 38, r"\{1," * 38 + "3" + r"\}" * 38,
]  # fmt: skip


@pytest.mark.parametrize("answer", HOSTILE, ids=[f"{index}-{text[:20]}" for index, text in enumerate(HOSTILE)])
def test_what_would_explode_is_never_computed(answer: str) -> None:
    """Without a time limit: a failure of this test is one that does not end."""
    assert score(answer, "7") == 0.0
    assert score("7", answer) in (0.0, None)
    assert equal_answers(answer, answer)
    assert not equal_answers(answer, f"1+{answer}")


def test_values_depend_neither_on_the_order_nor_on_the_thread() -> None:
    from concurrent.futures import ThreadPoolExecutor

    pairs = [(f"(x+{n})^2", f"x^2+{2 * n}x+{n * n}") for n in range(20)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda pair: equal_answers(*pair), pairs))
        assert not any(pool.map(lambda pair: equal_answers(pair[0], pair[1] + "+1"), pairs))
