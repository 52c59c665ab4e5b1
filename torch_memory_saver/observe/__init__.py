"""What only observes: the saver works without any folder of this one. The table in ``_additions.py`` says what each adds."""
