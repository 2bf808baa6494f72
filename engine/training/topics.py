"""What the target is asked to write about: kinds of task, how a user's turn begins, and plain subjects.

The model continues an opening as if it were the user, so that questions, passages and answers are all its own text.
None of this is taken from a benchmark. Next: `generate.py`, which uses it.
"""

import random
from dataclasses import dataclass

_SUBJECTS = (
    "the water cycle, volcanoes, the moon's phases, bees and pollination, migrating birds, glaciers, coral reefs, "
    "the human heart, vaccines, sleep, vitamins, exercise, first aid, allergies, teeth, memory, "
    "photosynthesis, electricity, magnets, sound, light and colour, gravity, chemical reactions, acids and bases, "
    "algorithms, databases, computer networks, web browsers, encryption, robots, spreadsheets, machine learning, "
    "the Roman empire, ancient Egypt, the Silk Road, the printing press, the steam engine, the space race, "
    "castles, the Renaissance, world trade, elections, courts of law, taxes, money and banks, inflation, "
    "a small bakery, a village school, a football club, a city library, a family farm, a train station, "
    "a fishing harbour, a hospital, a museum, a theatre, a mountain hut, a market, a hotel, a post office, "
    "cooking pasta, baking bread, growing tomatoes, tea and coffee, cheese, spices, street food, "
    "cycling, swimming, chess, hiking, running a marathon, tennis, sailing, dancing, gardening, photography, "
    "a birthday party, a wedding, moving house, a job interview, a school trip, a lost dog, a storm at sea, "
    "a broken bicycle, neighbours, saving energy, recycling, public transport, electric cars, solar panels, "
    "a new bridge, a flood, a forest fire, an earthquake, a strike at a factory, a mayor's speech, a charity run, "
    "a film review, a novel, a painting, a symphony, folk tales, poetry, proverbs, jokes, riddles, "
    "Paris, Tokyo, Cairo, Nairobi, Lima, Istanbul, India, Canada, Norway, Brazil, Australia, China, "
    "whales, wolves, elephants, penguins, ants, owls, horses, cats, sharks, dinosaurs, mushrooms, oak trees, "
    "friendship, courage, honesty, patience, grief, ambition, teamwork, leadership, time management, study habits"
)
SUBJECTS: tuple[str, ...] = tuple(_SUBJECTS.split(", "))


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of task."""

    name: str
    weight: int
    """How often it is taken, relative to the others."""
    system: str
    """Told to the model while it writes the user's turn; `{subject}` is filled in."""
    openings: tuple[str, ...]
    """The user's turn begins with one of these; `{subject}` is filled in, an empty one leaves everything open."""
    endings: tuple[str, ...] = ("",)
    """Added to what the model wrote for the user."""
    max_user_tokens: int = 80
    user_temperature: float = 0.85
    """Small models stop making sense above; passages to copy from need rarer words more than sense."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one conversation is about."""

    kind: Kind
    system: str
    opening: str
    ending: str


FOLLOW_UPS = (
    "",
    "Summarize",
    "Summarize your answer in",
    "Rewrite your answer",
    "Repeat your answer, but",
    "Correct the mistakes in your answer and return all of it.",
    "Return your whole answer again with",
    "Translate your answer into",
    "Make your answer shorter",
    "Explain",
    "Based on your answer,",
    "Which words of your answer",
    "List the main points of your answer",
    "Continue.",
)
"""How a user's second turn begins. Most ask for much of what was said already: copying has to be learned too."""

_PASSAGE_TEMPERATURE = 1.0
_ANY = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

KINDS: tuple[Kind, ...] = (
    Kind("open", 10, _ANY, ("",)),
    Kind(
        "chat",
        12,
        "You are a helpful assistant. The user asks one question about {subject}.",
        ("What", "How", "Why", "Can you explain", "Give me", "I want to", "Tell me about {subject}", "Is it true that"),
    ),
    Kind(
        "writing",
        10,
        "You are a creative writing assistant. The user asks for a text about {subject}.",
        (
            "Write a short story about {subject}",
            "Compose an email",
            "Write a blog post about {subject}",
            "Draft a letter",
            "Write a poem about {subject}",
            "Describe {subject}",
            "Rewrite the following paragraph",
            "Create a dialogue between",
            "Write a persuasive speech",
        ),
        max_user_tokens=70,
    ),
    Kind(
        "roleplay",
        4,
        "You are an actor who can play any character. The user names the character and the scene: {subject}.",
        ("Pretend to be", "Imagine you are", "You are a", "Act as", "Suppose you were"),
    ),
    Kind(
        "reasoning",
        7,
        "You are a careful thinker. The user poses a puzzle or a question of logic.",
        (
            "If",
            "A man",
            "Three friends",
            "Which of the following",
            "Suppose that",
            "Imagine a room",
            "Compare",
            "What would happen if",
        ),
    ),
    Kind(
        "math",
        18,
        "You are a maths teacher. The user gives one word problem with numbers, set around {subject}.",
        (
            "A",
            "Tom has",
            "Maria",
            "There are",
            "In a",
            "Sam buys",
            "A farmer",
            "Each",
            "Anna",
            "The",
            "If a train",
            "A shop sells",
            "Lena earns",
            "Solve for x:",
            "Every day",
            "Two",
        ),
    ),
    Kind(
        "code",
        5,
        "You are a programming assistant. The user asks for code.",
        (
            "Write a Python function that",
            "Write a function to",
            "Implement",
            "How do I",
            "Write an SQL query",
            "Explain this code:",
            "Write a C++ program",
            "Create an HTML page",
        ),
    ),
    Kind(
        "extraction",
        5,
        "You are an assistant who finds facts in a text. The user gives a text about {subject} and says what to find.",
        (
            "Extract all names and dates from the following text:",
            "Read the text below and answer with a list:",
            "Identify the main facts in this review:",
            "From the following passage, list",
        ),
        max_user_tokens=160,
        user_temperature=_PASSAGE_TEMPERATURE,
    ),
    Kind(
        "stem",
        6,
        "You are a science teacher. The user asks about {subject}.",
        ("Explain", "What is", "Describe the process", "How does", "What are the differences between", "Why do"),
    ),
    Kind(
        "humanities",
        6,
        "You are a teacher of history, economics and the arts. The user asks about {subject}.",
        ("Discuss", "How did", "What were the causes", "Explain the role of", "Compare"),
    ),
    Kind(
        "question",
        14,
        "You are a search engine. The user asks one short factual question about {subject}.",
        (
            "who",
            "what",
            "when",
            "where",
            "which",
            "how many",
            "what is the",
            "who was the first",
            "where is",
            "when did",
            "how long",
            "what does",
            "name of",
        ),
        max_user_tokens=40,
    ),
    Kind(
        "translation",
        14,
        "You are a translator. The user gives a sentence about {subject} and wants it in another language.",
        (
            "Translate German to English: Die",
            "Translate German to English: Der",
            "Translate German to English: Das",
            "Translate German to English: Wir",
            "Translate German to English: In",
            "Translate German to English: Es",
            "Translate German to English: Ein",
            "Translate German to English: Er",
            "Translate German to English: Nach",
            "Translate German to English: Auf",
            "Translate German to English: Im",
            "Translate the following German sentence into English: Die",
            "Translate French to English: Le",
            "Translate French to English: La",
            "Translate Spanish to English: El",
            "Translate English to German: The",
            "Translate English to French: The",
        ),
        max_user_tokens=60,
    ),
    Kind(
        "summarization",
        18,
        "You are an editor. The user gives a news article about {subject} and wants a summary.",
        (
            "Summarize: The",
            "Summarize: (Reuters)",
            "Summarize: A",
            "Summarize: On Monday",
            "Summarize: It was",
            "Summarize the following article: {subject}",
            "Summarize the following text: The",
            "Give me a short summary of this report about {subject}: ",
        ),
        max_user_tokens=420,
        user_temperature=_PASSAGE_TEMPERATURE,
    ),
    Kind(
        "editing",
        14,
        "You are an editor of texts and code. The user gives a text about {subject} and says what to change in it.",
        (
            "Correct the spelling of this text and return all of it:\n\nThe",
            "Return this paragraph in the past tense:\n\n{subject}",
            "Copy this list and add one line:\n\n1.",
            "Improve this email about {subject}, changing as little as you can:\n\nDear",
            "Here is a note about {subject}:\n\n",
            "Here is a Python function:\n\n```python\ndef",
            "Here is a configuration file:\n\n```yaml\n",
            "Here is a text.\n\nIn",
            "Here is a report:\n\nOn",
        ),
        endings=(
            "",
            "\n\nReturn it unchanged.",
            "\n\nReturn all of it with the names changed.",
            "\n\nReturn all of it and write every number as a word.",
            "\n\nRepeat it word for word, then say what is missing.",
            "\n\nCorrect the mistakes and return all of it.",
            "\n\nReturn all of it, in British spelling.",
            "\n\nRename what is not clear and return the whole.",
        ),
        max_user_tokens=240,
        user_temperature=_PASSAGE_TEMPERATURE,
    ),
    Kind(
        "retrieval",
        18,
        "You are a research assistant. The user gives numbered passages about {subject} and then asks a question.",
        (
            "Answer the question based on the passages.\n\nPassage 1: {subject}",
            "Here are some documents.\n\n[1] The",
            "Context: {subject}",
            "Passages:\n1. In",
            "Use the following pieces of text to answer the question at the end.\n\n{subject}",
            "Background: The",
        ),
        endings=(
            "\n\nQuestion: What is said about {subject}?",
            "\n\nQuestion: who is mentioned in the text?",
            "\n\nQuestion: when did it happen?",
            "\n\nQuestion: where is it?",
            "\n\nQuestion: what is the main idea?",
            "\n\nQuestion: why is {subject} important?",
            "\n\nQuestion: how many are there?",
            "",
        ),
        max_user_tokens=520,
        user_temperature=_PASSAGE_TEMPERATURE,
    ),
)


def assign(seed: int, index: int) -> Assignment:
    """Return the assignment of conversation `index`: a function of seed and index alone."""
    draw = random.Random(f"{seed}/{index}")
    kind = draw.choices(KINDS, [kind.weight for kind in KINDS])[0]
    subject = draw.choice(SUBJECTS)
    opening, ending = draw.choice(kind.openings), draw.choice(kind.endings)
    return Assignment(
        kind, kind.system.format(subject=subject), opening.format(subject=subject), ending.format(subject=subject)
    )
