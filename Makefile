# Needs only Python 3.11-3.13, make and git. Every target sets up what it needs, once.
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test check install clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## train a local swarm on real text for about three minutes, evaluate it, write text
	@$(BIN)/blocktrain-swarm --demo

test: $(STAMP) ## run the whole test suite
	@PYTHON=$(BIN)/python scripts/test

check: $(STAMP) ## lint, types, import arrows, README against the commands
	@PYTHON=$(BIN)/python scripts/check

install: $(STAMP) ## only set up .venv

clean: ## remove .venv and everything that tools have left
	rm -rf $(VENV) .links build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp holds the path it was made for: a venv that was copied or moved is made anew, since
# its commands would still run the old tree. So is one whose making was interrupted.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif
$(STAMP): pyproject.toml constraints.txt
	@python=$$(scripts/find-python) || exit 1; \
	if [ "$$(cat $@ 2>/dev/null)" != "$(CURDIR)" ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		"$$python" -m venv --clear $(VENV) || exit 1; \
	fi; \
	echo "installing blocktrain and what it needs into $(VENV) (a minute or more) ..."; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[demo,test]' || exit 1; \
	printf '%s\n' "$(CURDIR)" > $@
