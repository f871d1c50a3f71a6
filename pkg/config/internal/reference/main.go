// Command reference writes what is made of package config's types and their comments: schema.json and the tables in docs/configuration.md. It runs in
// the folder of package config (go generate), and is no part of the product.
package main

import (
	"bytes"
	"fmt"
	"os"
)

// Files that are made, seen from the folder of package config.
const (
	schemaFile   = "schema.json"
	documentFile = "../../docs/configuration.md"
)

func main() {
	if err := generate(); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func generate() error {
	made, err := files()
	if err != nil {
		return err
	}

	for name, content := range made {
		if old, err := os.ReadFile(name); err == nil && bytes.Equal(old, content) {
			continue
		}

		if err := os.WriteFile(name, content, 0o644); err != nil {
			return err
		}
	}

	return nil
}

// files are the names and the content of all that is made.
func files() (map[string][]byte, error) {
	comments, err := readComments()
	if err != nil {
		return nil, err
	}

	schema, err := schema(comments)
	if err != nil {
		return nil, err
	}

	old, err := os.ReadFile(documentFile)
	if err != nil {
		return nil, err
	}

	document, err := document(old, comments)
	if err != nil {
		return nil, fmt.Errorf("write tables into %s: %w", documentFile, err)
	}

	return map[string][]byte{schemaFile: schema, documentFile: document}, nil
}
