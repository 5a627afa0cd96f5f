"""Functions of engines that batch."""


def batching(many):
    """Return a function of one request. `many`, of several, is its attribute, for the certifier."""

    def function(checkpoint, prompt, **options):
        return many(checkpoint, [{"prompt": prompt, **options}])[0]

    function.many = many
    return function
