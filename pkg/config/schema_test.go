package config_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/pkg/config"
)

func compiledSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()

	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(config.Schema))
	require.NoError(t, err)

	compiler := jsonschema.NewCompiler()
	compiler.DefaultDraft(jsonschema.Draft2020)
	require.NoError(t, compiler.AddResource("schema.json", document))

	schema, err := compiler.Compile("schema.json")
	require.NoError(t, err)

	return schema
}

// validate checks a file against the schema as an editor does, after parsing it as YAML.
func validate(t *testing.T, schema *jsonschema.Schema, file string) error {
	t.Helper()

	var content any

	loader, err := yaml.NewLoader(bytes.NewReader([]byte(file)))
	require.NoError(t, err)

	if err := loader.Load(&content); errors.Is(err, io.EOF) {
		content = map[string]any{}
	} else if err != nil {
		t.Fatal(err)
	}

	asJSON, err := json.Marshal(content)
	require.NoError(t, err)

	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(asJSON))
	require.NoError(t, err)

	return schema.Validate(value)
}

func TestSchema_AcceptsValidFiles(t *testing.T) {
	schema := compiledSchema(t)

	for _, test := range goodFiles() {
		t.Run(test.name, func(t *testing.T) { assert.NoError(t, validate(t, schema, test.file)) })
	}
}

// TestSchema_RefusesInvalidFiles also asserts which files the schema does not refuse, so that improvements are
// noticed.
func TestSchema_RefusesInvalidFiles(t *testing.T) {
	schema := compiledSchema(t)

	for _, test := range badFiles() {
		if !test.bySchema && isUnreadable(test.file) {
			continue
		}

		t.Run(test.name, func(t *testing.T) {
			err := validate(t, schema, test.file)
			assert.Equal(t, test.bySchema, err != nil, err)
		})
	}
}

// isUnreadable reports whether the file is invalid YAML or cannot be converted to JSON.
func isUnreadable(file string) bool {
	var content any

	if err := yaml.Load([]byte(file), &content); err != nil {
		return true
	}

	_, err := json.Marshal(content)

	return err != nil
}
