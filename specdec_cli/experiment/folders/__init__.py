"""Creates, resumes and reads run folders, with their settings, records and other files."""
