package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v4"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
)

func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Create and validate configuration files, and print their schema",
		Args:  refuseArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newConfigValidateCommand(), &cobra.Command{
		Use:   "init",
		Short: "Print a commented configuration file to start with",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(config.Starter)

			return err
		},
	}, &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON schema of the configuration file",
		Long: `Print the JSON schema of the configuration file.

Editors with a YAML language server validate and complete a file that starts with
"# yaml-language-server: $schema=./schema.json".`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(config.Schema)

			return err
		},
	})

	return cmd
}

func newConfigValidateCommand() *cobra.Command {
	var output string

	cmd := &cobra.Command{
		Use:   "validate FILE|DIRECTORY|- ...",
		Short: "Validate configuration files",
		Long: `Validate files or standard input, as talos-ccm does when it loads them. In a directory, validate
the YAML files that have a configuration of talos-ccm, and print how many others were skipped. A
file may be

- a configuration file of talos-ccm or of the upstream Talos CCM, or
- a file with an ExtensionServiceConfig document, such as a machine configuration. The environment
  in the document is validated, too.

If the file is valid, print a summary and exit with 0. Otherwise exit with 1.
Errors, and warnings about parts without effect and probable mistakes, are printed to standard
error, one per line with its position. With -o json, print one object per file.`,
		Example: `  talos-ccm config validate rules.yaml
  talos-ccm config validate - < rules.yaml
  talos-ccm config validate controlplane.yaml`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("requires a file, a directory, or - for standard input")
			}

			return nil
		},
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			var errs []error

			for _, path := range args {
				files := []string{path}

				if entries, err := os.ReadDir(path); err == nil {
					var skipped int
					if files, skipped = yamlFiles(path, entries); skipped > 0 {
						fmt.Fprintf(cmd.ErrOrStderr(), "%s: skipped files without a configuration of talos-ccm: %d\n", path, skipped)
					}
				}

				for _, file := range files {
					errs = append(errs, validate(cmd, file, output))
				}

				if len(files) == 0 {
					errs = append(errs, fmt.Errorf("directory %s has no configuration of talos-ccm", path))
				}
			}

			return errors.Join(errs...)
		},
	}

	addChoice(cmd, &output, "output", "o", "Output format", "text", "json")

	return cmd
}

// yamlFiles returns the paths of the YAML files in a directory, and skips those that have no configuration of talos-ccm.
func yamlFiles(directory string, entries []os.DirEntry) (files []string, skipped int) {
	for _, entry := range entries {
		if !slices.Contains([]string{".yaml", ".yml"}, filepath.Ext(entry.Name())) || entry.IsDir() {
			continue
		}

		path := filepath.Join(directory, entry.Name())

		// A file that cannot be read is an error of its own.
		if data, err := os.ReadFile(path); err == nil && !config.IsOurs(extension.Name, data) {
			skipped++
		} else {
			files = append(files, path)
		}
	}

	return files, skipped
}

// validation is the result of `config validate` for programs; keep the format stable.
type validation struct {
	File     string           `json:"file"`
	Valid    bool             `json:"valid"`
	Problems []config.Problem `json:"problems"`
}

func validate(cmd *cobra.Command, path, output string) error {
	name, data, err := readConfig(cmd.InOrStdin(), path)
	if err != nil && output != "json" {
		return err
	}

	var compiled *config.Compiled

	result := validation{File: name, Problems: []config.Problem{}}

	if err != nil {
		result.Problems = []config.Problem{{Msg: err.Error()}}
	} else {
		compiled, err = parseFile(name, data)
	}

	if mistakes, ok := errors.AsType[*config.Error](err); ok {
		result.Problems = mistakes.Problems
		err = fmt.Errorf("%s is invalid", name)
	} else {
		if result.Valid = err == nil; result.Valid {
			result.Problems = append(result.Problems, compiled.Warnings...)
		}
	}

	if output == "json" {
		encoder := json.NewEncoder(cmd.OutOrStdout())
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")

		return errors.Join(encoder.Encode(result), err)
	}

	printProblems(cmd, name, result.Problems)

	if result.Valid {
		fmt.Fprintf(cmd.OutOrStdout(), "%s: valid\n", name)
	}

	return err
}

// printProblems prints one line per problem of a file to standard error.
func printProblems(cmd *cobra.Command, name string, problems []config.Problem) {
	if len(problems) > 0 {
		fmt.Fprintln(cmd.ErrOrStderr(), &config.Error{Name: name, Problems: problems})
	}
}

// parseFile reads a configuration file, or a file that contains one.
func parseFile(name string, data []byte) (*config.Compiled, error) {
	return config.ParseFile(name, data, config.Extension{
		Name:             extension.Name,
		MountPath:        settings.MountPath,
		CheckEnvironment: checkVariables,
		Warn: func(variables []string) []string {
			options, _ := serviceOptions(variables)

			return options.Warnings()
		},
		Unused: func(variables []string) map[string]string {
			options, _ := serviceOptions(variables)

			return options.Unused()
		},
	})
}

// serviceOptions returns the options of the extension service with the variables of a document, and the error with which it
// would fail. The options are nil only if the defaults are invalid.
func serviceOptions(variables []string) (*ccm.Options, error) {
	var service struct {
		Container struct {
			Args []string `yaml:"args"`
		} `yaml:"container"`
	}

	if err := yaml.Unmarshal(extension.Spec, &service); err != nil {
		return nil, err
	}

	return optionsOf(service.Container.Args, variables)
}

var separators = strings.NewReplacer("_", "", "-", "")

// checkVariables returns why the extension service could not be started with the variables of a document. It refuses
// misspelled prefixes, such as TALOSCCM_, because the service ignores variables without the prefix.
func checkVariables(variables []string) error {
	options := ccm.Options{CheckEnvironment: func(environ []string) error {
		_, err := serviceOptions(environ)

		return err
	}}
	errs := []error{options.CheckDocument(variables)}

	for _, variable := range variables {
		name, _, _ := strings.Cut(variable, "=")
		if !strings.HasPrefix(name, environmentPrefix) && strings.HasPrefix(strings.ToUpper(separators.Replace(name)), "TALOSCCM") {
			errs = append(errs, fmt.Errorf("environment variable %s sets no flag: it does not begin with %s", name, environmentPrefix))
		}
	}

	return errors.Join(errs...)
}

// readConfig reads a file, or stdin for "-".
func readConfig(stdin io.Reader, file string) (name string, data []byte, err error) {
	if name = file; file == "-" {
		name = "stdin"
	}

	if data, err = readInput(stdin, file); err != nil {
		return name, nil, err
	}

	return name, data, config.CheckNotEmpty(name, data)
}

type choice struct {
	value   *string
	allowed []string
}

// addChoice adds a flag to a command. The first allowed value is the default.
func addChoice(cmd *cobra.Command, value *string, name, shorthand, usage string, allowed ...string) {
	*value = allowed[0]
	cmd.Flags().VarP(choice{value, allowed}, name, shorthand, fmt.Sprintf("%s: %s.", usage, strings.Join(allowed, ", ")))
	utilruntime.Must(cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(allowed, cobra.ShellCompDirectiveNoFileComp)))
}

func (c choice) String() string { return *c.value }

func (choice) Type() string { return "string" }

func (c choice) Set(value string) error {
	if !slices.Contains(c.allowed, value) {
		return fmt.Errorf("must be one of %s", strings.Join(c.allowed, ", "))
	}

	*c.value = value

	return nil
}

// readInput reads a file, or stdin for "-".
func readInput(stdin io.Reader, file string) ([]byte, error) {
	if file == "-" {
		return io.ReadAll(stdin)
	}

	return os.ReadFile(file)
}
