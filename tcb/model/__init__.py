"""Someone else's model, made callable on packed batches; knows no pages."""
