"""Tasks for a target to answer: requests for passages, and tasks about passages that it wrote.

Self-drawn prompts lack long inputs, other languages, code and numbers, so these tasks have them.
Knows no models. Nothing here is taken from a benchmark.
"""

import random
from dataclasses import dataclass

LANGUAGES = ("German", "French", "Spanish", "Chinese", "Italian", "Portuguese")
TOPICS = (
    "a river that changes its course", "the history of glass", "a city's new tram line",
    "how bees find food", "a football match in the rain", "an election in a small country",
    "the price of wheat", "a painter who went blind", "the moons of Jupiter", "learning to swim",
    "a bridge that was closed", "an old recipe for bread", "sleep and memory", "a lost dog",
    "the invention of paper", "a strike at a harbour", "volcanoes under the sea", "the violin",
    "a school without walls", "electric cars in winter", "a court case about a name",
    "how vaccines work", "a family that keeps goats", "the longest railway", "chess players",
    "a storm on the coast", "a start-up that repairs phones", "the theatre of ancient Greece",
    "a hike across a desert", "coral reefs", "taxes on sugar", "a museum robbery", "the tides",
    "a new law on noise", "the life of a queen", "machine translation", "marathon training",
    "a village without a doctor", "the Silk Road", "how banks lend money", "a film director",
    "urban gardens", "an island with wild horses", "the discovery of a planet", "a tax office",
    "birds that migrate", "the making of cheese", "a dispute over water", "the first computers",
    "a concert in a church", "earthquakes", "a police officer's first day", "the tea trade",
    "winter sports", "a scientist's mistake", "satellites", "a hotel by a lake", "the human heart",
    "the rules of a card game", "a letter from abroad",
)  # fmt: skip
_ENGLISH = (
    "Write a news article about {topic}.",
    "Write an encyclopedia entry about {topic}, with names, places and years.",
    "Tell a story about {topic}.",
    "Explain {topic} to a student, in several paragraphs.",
    "Write a long e-mail about {topic}.",
    "Write an interview about {topic}.",
    "Write a blog post about {topic}.",
    "Describe {topic} in detail.",
)
_FOREIGN = (
    "Write a short text about {topic} in {language}.",
    "Write a news report in {language} about {topic}.",
    "Write five sentences in {language} about {topic}.",
    "Write a dialogue in {language} about {topic}.",
)
_PROBLEM = (
    "Write a maths word problem about {topic}, without its solution.",
    "Write a word problem with prices and amounts about {topic}. Do not solve it.",
    "Make up an exercise in arithmetic about {topic}. Give the exercise only.",
    "Write an exercise on percentages, speeds or ages about {topic}, without an answer.",
)
_CODE = (
    "Write a Python function that could be part of a program about {topic}.",
    "Write a short JavaScript program about {topic}.",
    "Write a Python class for data about {topic}, with comments.",
    "Write an SQL table and three queries about {topic}.",
)
_QUESTION = (
    "Ask one short question about {topic}.",
    "Write a quiz question about {topic}, without the answer.",
    "What would a child ask about {topic}? Write one question.",
    "Write one question about {topic} that begins with who, when, where or how many.",
)
SEEDS = {
    "english": (_ENGLISH, 5), "foreign": (_FOREIGN, 4), "problem": (_PROBLEM, 4),
    "code": (_CODE, 2), "question": (_QUESTION, 3),
}  # fmt: skip
TASKS = {
    "english": (
        "Summarize this text:\n\n{passage}",
        "{passage}\n\nSummarise the text above in three sentences.",
        "Give a summary of the following article.\n{passage}",
        "TL;DR of this, please: {passage}",
        "Translate the following into {language}:\n{passage}",
        "Translate English to {language}: {passage}",
        "What is the main point of this text, and which details support it?\n\n{passage}",
        "Rewrite the following in simpler words:\n\n{passage}",
        "Rewrite this text as a formal letter.\n\n{passage}",
        "Correct the grammar and the style of this text:\n{passage}",
        "List the key facts in this passage:\n\n{passage}",
        "Here are some notes.\n\n{passage}\n\n{other}\n\nUsing the notes, answer: {question}",
        "Passage 1: {passage}\n\nPassage 2: {other}\n\nWhat do the two passages have in common?",
        "{passage}\n\n{other}\n\nQuestion: {question}\nAnswer:",
        "Read the passage and answer the question.\n\n{passage}\n\nQuestion: {question}",
        "Extract all names, places and numbers from this text as a list.\n\n{passage}",
        "Continue this text:\n\n{passage}",
        "Write a critical review of the following text:\n\n{passage}",
    ),
    "foreign": (
        "Translate this into English:\n{passage}",
        "Translate to English: {passage}",
        "What does this mean in English? {passage}",
        "Summarise the following text in English.\n\n{passage}",
        "Which language is this, and what does it say?\n{passage}",
    ),
    "problem": (
        "{passage}",
        "Solve this step by step: {passage}",
        "{passage}\nExplain your reasoning, then give the answer.",
        "What is the answer to this exercise?\n\n{passage}",
    ),
    "code": (
        "What does this code do?\n\n{passage}",
        "Add comments and error handling to this program:\n\n{passage}",
        "Find the mistakes in this code and write a better version.\n\n{passage}",
        "Write tests for this code:\n{passage}",
    ),
    "question": (
        "{question}",
        "{question} Answer in one sentence.",
        "{question} Explain in detail.",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Passage:
    """A text that the target wrote. kind: a key of `SEEDS`."""

    kind: str
    text: str


def seed(rng: random.Random) -> tuple[str, str]:
    """A kind of passage, and a request for one."""
    kind = rng.choices(list(SEEDS), [share for _, share in SEEDS.values()])[0]
    words = {"topic": rng.choice(TOPICS), "language": rng.choice(LANGUAGES)}
    return kind, rng.choice(SEEDS[kind][0]).format(**words)


def task(rng: random.Random, passages: list[Passage]) -> str:
    """A task about one or two of `passages`. A kind without passages uses one of another kind."""
    kind = rng.choices(list(SEEDS), [share for _, share in SEEDS.values()])[0]
    by_kind: dict[str, list[str]] = {}
    for passage in passages:
        by_kind.setdefault(passage.kind, []).append(passage.text)
    if kind not in by_kind:
        kind = rng.choice(sorted(by_kind))

    def some(of: str, least: int, most: int) -> str:
        text = rng.choice(by_kind.get(of) or by_kind[kind])
        return shortened(text, rng.randint(least, most))

    # Half of the passages are long, like inputs of summaries.
    words = {
        "passage": some(kind, 150, 700) if rng.random() < 0.5 else some(kind, 600, 2400),
        "other": some("english", 300, 1200),
        "question": some("question", 40, 200),
        "language": rng.choice(LANGUAGES),
    }
    return rng.choice(TASKS[kind]).format_map(words)


def shortened(text: str, most: int) -> str:
    """`text` up to the last end of a sentence or line within `most` characters, or else cut at
    `most`."""
    text = text.strip()
    if len(text) <= most:
        return text
    head = text[:most]
    end = max(head.rfind(mark) for mark in (". ", "\n", "! ", "? ", "。"))
    return head[: end + 1].strip() if end > most // 3 else head
