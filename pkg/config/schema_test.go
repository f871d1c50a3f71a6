package config_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/pkg/config"
)

func compiledSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()

	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(config.Schema))
	if err != nil {
		t.Fatal(err)
	}

	compiler := jsonschema.NewCompiler()
	compiler.DefaultDraft(jsonschema.Draft2020)

	if err := compiler.AddResource("schema.json", document); err != nil {
		t.Fatal(err)
	}

	schema, err := compiler.Compile("schema.json")
	if err != nil {
		t.Fatal(err)
	}

	return schema
}

// validate does what an editor does: it reads the file with a YAML library of its own and checks the values.
func validate(t *testing.T, schema *jsonschema.Schema, file string) error {
	t.Helper()

	var content any

	loader, err := yaml.NewLoader(bytes.NewReader([]byte(file)))
	if err != nil {
		t.Fatal(err)
	}

	if err := loader.Load(&content); errors.Is(err, io.EOF) {
		content = map[string]any{}
	} else if err != nil {
		t.Fatal(err)
	}

	asJSON, err := json.Marshal(content)
	if err != nil {
		t.Fatal(err)
	}

	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(asJSON))
	if err != nil {
		t.Fatal(err)
	}

	return schema.Validate(value)
}

func TestTheSchemaAcceptsWhatLoads(t *testing.T) {
	schema := compiledSchema(t)

	for _, test := range goodFiles() {
		t.Run(test.rule, func(t *testing.T) {
			if err := validate(t, schema, test.file); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestTheSchemaRefusesMistakesOfForm also asserts what a schema does not see, so that a better one is noticed.
func TestTheSchemaRefusesMistakesOfForm(t *testing.T) {
	schema := compiledSchema(t)

	for _, test := range badFiles() {
		if !test.bySchema && notReadable(test.file) {
			continue
		}

		t.Run(test.rule, func(t *testing.T) {
			if err := validate(t, schema, test.file); (err != nil) != test.bySchema {
				t.Errorf("got %v, refused by the schema: %v", err, test.bySchema)
			}
		})
	}
}

// notReadable tells whether YAML alone refuses the file, or gives what JSON cannot hold.
func notReadable(file string) bool {
	var content any

	if err := yaml.Load([]byte(file), &content); err != nil {
		return true
	}

	_, err := json.Marshal(content)

	return err != nil
}
