"""Training loops of other libraries on unequal devices. Each module needs the library it is named after."""
