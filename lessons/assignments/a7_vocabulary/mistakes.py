"""Wrong answers to assignment 7, each a function of the reference with one slip."""

from collections import Counter

from lessons.assignments.grading import Mistake
from minispec.methods import vocabulary
from minispec.methods.vocabulary import MAJORITY, RECENT_TOKENS, VOTE_RATIO, Language, Subset

count, votes, detect = vocabulary.count, vocabulary.votes, vocabulary.Compressed.detect_languages
logits, scatter, select = Subset.logits, Subset.scatter, vocabulary.Compressed.select


def without_forced(texts, forced, size):
    return count(texts, [], size)


def forced_on_top(texts, forced, size):
    """Forced tokens do not count towards the size."""
    return count(texts, forced, size + len(set(forced)))


def forced_with_repeats(texts, forced, size):
    language = count(texts, forced, size)
    again = [token for token in dict.fromkeys(forced) if forced.count(token) > 1]
    ids, counts = (*again, *language.ids), (*(0 for _ in again), *language.counts)
    return Language(ids[:size], counts[:size])


def ties_by_appearance(texts, forced, size):
    seen = Counter(token for text in texts for token in text)
    ids = list(dict.fromkeys(forced))
    ids += [token for token, _ in seen.most_common() if token not in ids]
    return Language(tuple(ids[:size]), tuple(seen[token] for token in ids[:size]))


def sorted_rows(self, hidden):
    return logits(self, hidden)[..., self.host_ids.argsort()]


def all_rows(self, hidden):
    full = hidden.new_zeros(*hidden.shape[:-1], self.size)
    full[..., self.host_ids] = logits(self, hidden)
    return full


def indices(self, token):
    return token


def half_the_probability(self, probs):
    return 0.5 * scatter(self, probs)


def in_front(self, probs):
    """Entry j is left where it is."""
    full = probs.new_zeros(self.size)
    full[: len(probs)] = probs
    return full


def some_everywhere(self, probs):
    full = scatter(self, probs) + 0.01
    return full / full.sum()


def not_spread(self, probs):
    return probs


# ---- the language --------------------------------------------------------------------------------


def votes_by(share, ratio):
    def wrong(languages):
        found = {}
        for token in {token for language in languages.values() for token in language.ids}:
            shares = {name: share(language, token) for name, language in languages.items()}
            for name, mine in shares.items():
                rest = max((s for other, s in shares.items() if other != name), default=0.0)
                if len(languages) > 1 and mine > ratio * rest:
                    found[token] = name
        return found

    return wrong


def relative(language, token):
    return dict(zip(language.ids, language.counts)).get(token, 0) / (sum(language.counts) + 1)


def absolute(language, token):
    return dict(zip(language.ids, language.counts)).get(token, 0)


def membership(languages):
    """A token that only one language lists votes for it."""
    holders = {}
    for name, language in languages.items():
        for token in language.ids:
            holders.setdefault(token, []).append(name)
    return {
        token: names[0]
        for token, names in holders.items()
        if len(names) == 1 < len(languages)
    }


def alone_too(languages):
    if len(languages) == 1:
        return {token: name for name, language in languages.items() for token in language.ids}
    return votes(languages)


def over_all_tokens(self, tokens):
    found = Counter(self.votes[token] for token in tokens if token in self.votes)
    for name, n in found.items():
        if n >= MAJORITY * found.total():
            return (name,)
    return tuple(sorted(found)) or tuple(sorted(self.languages))


def by_appearance(self, tokens):
    names = [self.votes[token] for token in tokens[-RECENT_TOKENS:] if token in self.votes]
    right = detect(self, tokens)
    return tuple(dict.fromkeys(names)) if names and len(right) > 1 else right


def most_votes(self, tokens):
    found = Counter(self.votes[token] for token in tokens[-RECENT_TOKENS:] if token in self.votes)
    return (found.most_common(1)[0][0],) if found else tuple(sorted(self.languages))


def none_if_unclear(self, tokens):
    found = any(token in self.votes for token in tokens[-RECENT_TOKENS:])
    return detect(self, tokens) if found else ()


def made_again(self, tokens):
    self.subsets.clear()
    return select(self, tokens)


def with_repeats(self, tokens):
    names = self.detect_languages(tokens)
    ids = [token for name in names for token in self.languages[name].ids]
    return self.subsets.setdefault(names, Subset(self.weight, ids))


def sorted_ids(self, tokens):
    names = self.detect_languages(tokens)
    ids = sorted({token for name in names for token in self.languages[name].ids})
    return self.subsets.setdefault(names, Subset(self.weight, ids))


def first_language_only(self, tokens):
    names = self.detect_languages(tokens)
    ids = list(self.languages[names[0]].ids)
    return self.subsets.setdefault(names, Subset(self.weight, ids))


MISTAKES = [
    Mistake("count", "forced tokens are left out", {"count": without_forced}),
    Mistake("count", "forced tokens are added to the `size` others", {"count": forced_on_top}),
    Mistake("count", "a forced token that is named twice stands twice",
            {"count": forced_with_repeats}),
    Mistake("count", "equal counts are in order of appearance, not by id",
            {"count": ties_by_appearance}),
    Mistake("subset", "rows are in the order of their ids, not of `ids`",
            {"Subset.logits": sorted_rows}),
    Mistake("subset", "logits of all V tokens come back: only the subset's rows are read",
            {"Subset.logits": all_rows}),
    Mistake("subset, lossless", "indices of the subset are returned as token ids",
            {"Subset.to_full_ids": indices}),
    Mistake("scatter, lossless", "the distribution sums to one half",
            {"Subset.scatter": half_the_probability}),
    Mistake("scatter", "entry j stays at token j: it belongs to token ids[j]",
            {"Subset.scatter": in_front}),
    Mistake("scatter, lossless", "tokens outside the subset get some probability: they had none",
            {"Subset.scatter": some_everywhere}),
    Mistake("scatter", "the distribution is still over the subset", {"Subset.scatter": not_spread}),
    Mistake("votes", "counts are compared: compare shares",
            {"votes": votes_by(absolute, VOTE_RATIO)}),
    Mistake("votes", "a token votes as soon as it is more frequent than elsewhere",
            {"votes": votes_by(relative, 1.0)}),
    Mistake("votes", "a single language's tokens vote for it", {"votes": alone_too}),
    Mistake("votes", "a token votes if only one language lists it, and never otherwise",
            {"votes": membership}),
    Mistake("detect_languages", "all tokens vote: only the last RECENT_TOKENS do",
            {"Compressed.detect_languages": over_all_tokens}),
    Mistake("detect_languages", "languages come in order of appearance, not of the alphabet",
            {"Compressed.detect_languages": by_appearance}),
    Mistake("detect_languages", "the language with the most votes is taken alone, majority or not",
            {"Compressed.detect_languages": most_votes}),
    Mistake("detect_languages", "without votes there is no language: then it is all of them",
            {"Compressed.detect_languages": none_if_unclear}),
    Mistake("select", "a subset is made again for the same languages",
            {"Compressed.select": made_again}),
    Mistake("select", "a token of two languages stands twice",
            {"Compressed.select": with_repeats}),
    Mistake("select", "tokens are sorted: keep the languages' order",
            {"Compressed.select": sorted_ids}),
    Mistake("select", "only the first of the languages is used",
            {"Compressed.select": first_language_only}),
]  # fmt: skip
