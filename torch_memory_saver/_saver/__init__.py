"""What the public class does once it is in use, and the checks of what users pass and set."""
