"""The implementation of the public class, and the checks of arguments and settings."""
