startTheme(() => {});
