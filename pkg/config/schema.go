package config

import _ "embed" // the schema

// Schema is the JSON schema of the file, for editors. It describes what Parse accepts as far as a schema can.
//
//go:embed schema.json
var Schema []byte
